"""Decoders with cross-attention, through OpenVINO: T5, MarianMT and Whisper. All caches are NumPy's, outside the model.

CPU: measured. GPU: written against the documented interface; not verified on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import EncoderEntry
from outrider.errors import BundleError, OptionError, RequestError
from outrider.models.backends.common import BufferStep, SequentialBackend
from outrider.models.backends.devices import check_device, compile_error, facts_of, hints_of
from outrider.models.backends.encoder_states import Cross, Encoder
from outrider.models.backends.infer_calls import GraphState
from outrider.models.backends.processor import name_of
from outrider.models.backends.taps import read_ir
from outrider.models.kv import Unbranched
from outrider.system.core import new_core
from outrider.types import NO_PROMPT, CacheUse, Capabilities, Chunk, Exactness, Prompt

_KEYS = 64  # numbers of keys are rounded up to multiples of it


class CrossSlot(Unbranched):
    """A sequence's self-attention keys and values, and the cross-attention's of its source.

    past: for each of the decoder's inputs a buffer, float32 [capacity, heads, head size], whose first `length` rows
    hold tokens. Trimming only lowers `length`.
    """

    def __init__(self, backend: EncoderDecoder, past: dict[str, NDArray[np.float32]], cross: Cross, size: int) -> None:
        self.past, self.cross, self.length = past, cross, 0
        self._backend: EncoderDecoder | None = backend
        self.size = size  # tokens of the cache that it takes

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left."""
        self.length = min(self.length, length)

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds `length` tokens; see `BenchmarkSlot`."""
        self.length = length

    def publish(self, token_ids: Sequence[int]) -> None:
        """Nothing: there is no prefix cache. An answer's prefix is a few tokens long, and belongs to one source."""

    def close(self) -> None:
        """Release the memory. Closing twice does no harm."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self.past = {}
            backend.give_back(self)


class EncoderDecoder(SequentialBackend):
    """One encoder-decoder model on one device.

        backend = EncoderDecoder(path, encoder_path, entry, vocab_size=32_100)
        backend.allocate(max_tokens=4_096)
        slot = backend.open(max_tokens=200, prompt=Prompt([0], source=Source.of_text(token_ids)))
        chunk = Chunk(slot, [0], num_rows=1)
        (row,) = backend.submit([chunk]).wait().rows(chunk)
        row.full()    # float32 [vocab_size]

    `open` runs the encoder, unless the source has its states already, and makes the cross-attention's keys and values.
    A prompt without a source, as measurements have it, gets random states. The decoder gets the past of one sequence in
    each call and returns the new rows of keys and values, so the sequences of one `submit` run one after another. A
    source takes as much of the cache as a token for each of its positions.

    A row's bits depend on the number of keys in its call, so that is a function of the row's position: keys are padded
    to a multiple of 64, and a chunk across such a border takes two calls.

    Raises:
        OptionError: for a device that is not there, or a precision of the cache other than f32.
        BundleError: when a file cannot be read, or is no such model.
        DeviceError: when the device cannot compile it.
    """

    runtime = "OpenVINO"
    cache_precision = "f32"
    graph: GraphState

    def __init__(
        self,
        model_path: Path,
        encoder_path: Path,
        encoder: EncoderEntry,
        *,
        vocab_size: int,
        device: str = "CPU",
        precision: str = "auto",
        cache_precision: str = "auto",
        num_threads: int = 0,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        core = self.core = new_core()
        check_device(core, device)
        if cache_precision not in ("auto", "f32"):
            raise OptionError(
                f"cache_precision={cache_precision!r} is not for encoder-decoder models, whose cache is in f32. Leave "
                "it out."
            )
        kinds = {} if precision == "auto" else {"INFERENCE_PRECISION_HINT": precision}
        hints = hints_of(device, num_threads, properties, **kinds)
        model = read_ir(core, model_path)
        shapes = {port.get_any_name(): port.get_partial_shape() for port in model.inputs}
        pasts = {name: shape for name, shape in shapes.items() if name.startswith("past.")}
        if not pasts or not {"input_ids", "pad", "rows"} <= {*shapes}:
            raise BundleError(f"{model_path} is no decoder with cross-attention. Export the bundle again.")
        self._pasts = {name: (s[1].get_length(), s[2].get_length()) for name, s in pasts.items()}
        try:
            self._compiled = core.compile_model(model, device, hints)
        except (RuntimeError, TypeError) as error:
            raise compile_error(core, device, model_path.parent.name, error) from error
        self._request = self._compiled.create_infer_request()
        self.graph = GraphState(device)
        self.encoder = Encoder(core, encoder_path, model_path, encoder, device, hints, self.graph)
        self.device, self.vocab_size = device, vocab_size
        self.logits_width: int = self._compiled.output("logits").get_partial_shape()[2].get_length()
        self.precision = name_of(self._compiled.get_property("INFERENCE_PRECISION_HINT"))
        self._rows = np.empty((0, self.logits_width), dtype=np.float32)
        self._num_tokens = self._num_used = 0
        self.can = Capabilities(bit_exact_batching=False, one_call=False, reads_sources=True)
        self.use(Exactness())

    def use(self, exactness: Exactness) -> None:
        """Pad calls by this rule from now on, and report this exactness. Not while slots are open."""
        super().use(exactness)
        self._zeros = np.zeros((_KEYS + exactness.rule.num_spare, *next(iter(self._pasts.values()))), dtype=np.float32)

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the time of a call depends on besides the model, as far as it is known."""
        return facts_of(self.core, self.device, self._compiled) | {"cache": self.cache_precision}

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""
        return len(self._pasts) // 2

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in the cache, over all layers; also of one of the source's positions."""
        return float(4 * sum(heads * size for heads, size in self._pasts.values()))

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence, beside the longest source."""
        return max(self._num_tokens - self.encoder.entry.context_length - self.num_spare, 0)

    @property
    def cache(self) -> CacheUse:
        """Occupancy. There is no prefix cache."""
        return CacheUse(self._num_tokens, self.bytes_per_token, self._num_used, 0, 0, 0, 0, 0, 0)

    def allocate(self, max_tokens: int) -> None:
        """Set how many tokens and positions of sources all slots may have together."""
        self._num_tokens = max_tokens

    def tokens_for(self, max_tokens: int) -> int:
        """The argument for `allocate` with which one slot can have `max_tokens`."""
        return max_tokens + self.encoder.entry.context_length + self.num_spare

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> CrossSlot | None:
        """A slot with room for `max_tokens`; None while other slots hold the room.

        Raises:
            RequestError: for a prompt with embeds or an adapter, or a source that the encoder cannot read.
            DeviceError: when the device fails.
        """
        if prompt.embeds:
            raise RequestError("The prompt has embeds, and encoder-decoder models read none. Pass it without.")
        prompt.check_adapter(self)
        source, entry = prompt.source, self.encoder.entry
        length = 0
        if source is not None:
            if source.kind != entry.kind:
                raise RequestError(f"The encoder reads {entry.kind}, and the prompt's source is something else.")
            length = len(source.values) if entry.kind == "text" else entry.context_length
            if length > entry.context_length:
                raise RequestError(f"The source has {length:,} tokens; the encoder reads {entry.context_length:,}.")
        capacity = max_tokens + self.num_spare
        size = capacity + length
        if self._num_used + size > self._num_tokens:
            return None
        cross = self.encoder.trial() if source is None else self.encoder.read(source)
        past = {name: np.empty((capacity, *shape), dtype=np.float32) for name, shape in self._pasts.items()}
        self._num_used += size
        return CrossSlot(self, past, cross, size)

    def clear_prefixes(self) -> None:
        """Do nothing: there are none."""

    def give_back(self, slot: CrossSlot) -> None:
        """Take a slot's room back."""
        self._num_used -= slot.size

    def evaluate(self, chunks: Sequence[Chunk]) -> BufferStep:
        """The rows of the chunks, which are chains."""
        num_rows = sum(chunk.num_rows for chunk in chunks)
        if len(self._rows) < num_rows:
            self._rows = np.empty((num_rows, self.logits_width), dtype=np.float32)
        at = 0
        wanted: dict[Chunk, range] = {}
        for chunk in chunks:
            wanted[chunk] = range(at, at + chunk.num_rows)
            for part in self._parts(chunk):
                self._rows[at : at + part.num_rows] = self._run(part)
                at += part.num_rows
        return BufferStep(self._rows, wanted, self.vocab_size, dict.fromkeys(chunks, ()))

    def _num_keys(self, position: int) -> int:
        """The number of keys in calls with a token at this position: the padding is after it."""
        return -(-(position + 1 + self.num_spare) // _KEYS) * _KEYS

    def _parts(self, chunk: Chunk) -> Iterator[Chunk]:
        """The calls for a chunk: tokens in one call have one number of keys. So a row's bits depend on its position."""
        slot, count = chunk.slot, len(chunk.token_ids)
        begin = slot.length
        positions = range(begin, begin + count)
        ends = [i + 1 for i, p in enumerate(positions) if self._num_keys(p) != self._num_keys(p + 1)]
        first = 0
        for end in [*(each for each in ends if each < count), count]:
            num_rows = max(0, min(end - first, end - (count - chunk.num_rows)))
            yield Chunk(slot, chunk.token_ids[first:end], num_rows)
            first = end

    def _run(self, chunk: Chunk) -> NDArray[np.float32]:
        """Evaluate one chunk, and return the logits of its last rows, float32 [num_rows, logits width]."""
        slot, count, rule = chunk.slot, len(chunk.token_ids), self.capabilities.rows
        wanted = max(rule.logits(chunk.num_rows), 1)
        begin = max(count - wanted, 0) if chunk.num_rows else 0
        padded = max(rule.num_rows([count]), begin + wanted)
        token_ids = np.zeros((1, padded), dtype=np.int64)
        token_ids[0, :count] = chunk.token_ids
        num_pads = self._num_keys(slot.length + count - 1) - slot.length - padded
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": token_ids,
            "pad": self._zeros[:num_pads],
            "rows": np.arange(begin, begin + wanted, dtype=np.int64),
            **{name: buffer[: slot.length] for name, buffer in slot.past.items()},
            **slot.cross.arrays,
        }
        with self.graph.calling():
            made = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        end = slot.length + count
        for name, buffer in slot.past.items():
            buffer[slot.length : end] = made[name.replace("past.", "new.", 1)][:count]
        slot.length = end
        first = count - chunk.num_rows - begin
        logits: NDArray[np.float32] = made["logits"][0, first : first + chunk.num_rows]
        return logits
