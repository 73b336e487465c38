"""ONNX Runtime. Keys and values are in buffers that the model reads and writes in place.

CPU: measured. The OpenVINO, DirectML and CUDA execution providers: written against the documented interface; not
verified on hardware.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.errors import BundleError, DeviceError, OptionError, one_line
from outrider.models.backends.common import BufferStep, SequentialBackend
from outrider.models.backends.features import check_features
from outrider.models.backends.onnx_cache import BufferCache, BufferSlot
from outrider.models.backends.onnx_providers import find_provider
from outrider.models.kv import Prefixes
from outrider.types import NO_PROMPT, CacheUse, Capabilities, Chunk, Exactness, Prompt

_KINDS: dict[str, type[np.generic]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_PRECISIONS: dict[type[np.generic], str] = {np.float32: "f32", np.float16: "f16"}


class OnnxRuntime(SequentialBackend):
    """One model in ONNX on one device.

        backend = OnnxRuntime(path, device="CPU", vocab_size=49_152)
        backend.allocate(max_tokens=8_192)
        slot = backend.open(max_tokens=200)
        chunk = Chunk(slot, token_ids, num_rows=1)
        (row,) = backend.submit([chunk]).wait().rows(chunk)
        row.full()    # float32 [vocab_size]

    GroupQueryAttention takes one sequence per call if it has several rows and a past. So the sequences of one `submit`
    run one after another. Where the system commits memory lazily, a cache takes none before it is written to.

    device: "CPU"; "CUDA" or "DML", with a number after a dot; "GPU" and "NPU" are those of any provider that is here.
    properties: ONNX Runtime's session configuration, such as {"session.intra_op.allow_spinning": "0"}. features: the
    outputs of hidden states that chunks may ask for.

    Raises:
        OptionError: for a device that no installed execution provider has, or a precision it does not calculate in.
        BundleError: when the model cannot be read, or lacks inputs or outputs that `outrider.bundle` describes, or
            these hidden states.
        DeviceError: when the device cannot run the model, or cannot update its cache in place.
    """

    runtime = "ONNX Runtime"

    def __init__(
        self,
        model_path: Path,
        *,
        vocab_size: int,
        device: str = "CPU",
        precision: str = "auto",
        cache_precision: str = "auto",
        num_threads: int = 0,
        properties: Mapping[str, Any] | None = None,
        features: Sequence[str] = (),
    ) -> None:
        self.device = device
        self.features = tuple(features)
        self._provider, self._device_id, provider_options = find_provider(device)
        self._properties = _SESSION | {name: str(value) for name, value in (properties or {}).items()}
        options = _session_options(num_threads, self._properties)
        try:
            self._session = ort.InferenceSession(
                str(model_path), options, providers=[(self._provider.name, provider_options)]
            )
        except Exception as error:  # a dozen classes with no other common base
            kind = BundleError if device == "CPU" else DeviceError
            raise kind(f"{model_path} cannot be loaded by ONNX Runtime on {device}: {one_line(error)}.") from error
        if self._session.get_providers()[0] != self._provider.name:  # it falls back to another one silently
            raise DeviceError(f"{self._provider.name} does not start on {device}. Use device CPU, or fix its driver.")
        self._num_threads = num_threads
        self._read_shape(model_path)
        self.vocab_size = vocab_size
        self._ones = np.ones((1, 0), dtype=np.int64)
        self._rows = np.empty((0, self.logits_width), dtype=self._logits_kind)
        self.precision = _PRECISIONS[self._logits_kind]
        self.cache_precision = _PRECISIONS[self._cache_kind]
        for name, asked, found in (
            ("precision", precision, self.precision),
            ("cache_precision", cache_precision, self.cache_precision),
        ):
            if asked not in ("auto", found):
                raise OptionError(
                    f"{name}={asked!r} is not what the ONNX model in {model_path.parent} was exported for, {found!r}. "
                    "Use 'auto'."
                )
        self.can_pad_apart = self._has_extra
        self.can = Capabilities(bit_exact_batching=False, one_call=False, features=self.features)
        self.use(Exactness())
        self.allocate(16)
        if device != "CPU":
            self._check_in_place()
        self.allocate(0)

    def _read_shape(self, model_path: Path) -> None:
        """Layers, heads and names from the graph's own inputs and outputs."""
        inputs = {port.name: port for port in self._session.get_inputs()}
        outputs = {port.name: port for port in self._session.get_outputs()}
        extra = {port.name for port in self._session.get_overridable_initializers()}
        self._pasts = [name for name in inputs if name.startswith("past_key_values.")]
        presents = [name.replace("past_key_values", "present") for name in self._pasts]
        self._has_extra = _EXTRA in extra
        needed = {"input_ids", "attention_mask", *_ROWS, "logits", *presents}
        missing = sorted(needed - {*inputs, *outputs, *extra})
        unknown = sorted({*inputs} - {"input_ids", "attention_mask", "position_ids", *self._pasts, *_ROWS, _EXTRA})
        if missing or unknown or not self._pasts:
            what = f"lacks {missing[0]}" if missing else f"asks for {unknown[0]}" if unknown else "has no cache"
            raise BundleError(f"{model_path} {what}, so it cannot be run. Export it again with 'outrider export'.")
        check_features(self.features, outputs)
        self._widths: dict[str, int] = {name: outputs[name].shape[2] for name in self.features}
        self._has_positions = "position_ids" in inputs
        past = inputs[self._pasts[0]]
        shape = (past.shape[1], past.shape[3], outputs["logits"].shape[2])
        if not all(isinstance(dim, int) for dim in shape):
            raise BundleError(
                f"{model_path} leaves open how many heads, numbers a head or logits it has. Export it again."
            )
        *self._cache_shape, self.logits_width = shape  # [kv_heads, head_size]
        kinds = past.type, outputs["logits"].type
        if not {*kinds} <= {*_KINDS}:
            raise BundleError(f"{model_path} has a cache and logits of {kinds}; float and float16 are known here.")
        self._cache_kind, self._logits_kind = (_KINDS[kind] for kind in kinds)

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the time of a call depends on besides the model, as far as it is known."""
        found = {"provider": self._provider.name, "device": self.device, "threads": str(self._num_threads)}
        return found | self._properties | {"machine": platform.processor(), "onnxruntime": ort.__version__}

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""
        return len(self._pasts) // 2

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in the cache, over all layers."""
        return self._cache.bytes_per_token

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence, without padding."""
        return max(self._cache.max_tokens - self.num_spare, 0)

    @property
    def cache(self) -> CacheUse:
        """Prefix-cache occupancy and hit statistics."""
        return self._cache.use

    @property
    def prefixes(self) -> Prefixes | None:
        """The prefix cache as `PrefixStore` uses it; None where its memory is not the host's."""
        return self._cache if self._provider.memory == "cpu" else None

    def allocate(self, max_tokens: int) -> None:
        """Set how many tokens all sequences may have together. Published prefixes are dropped."""
        provider = self._provider
        memory = provider.memory, self._device_id
        self._cache = BufferCache(
            self._session,
            self._pasts,
            self._cache_shape,
            self._cache_kind,
            max_tokens,
            memory=memory,
            device=self.device,
        )

    def tokens_for(self, max_tokens: int) -> int:
        """The argument for `allocate` with which one slot can have `max_tokens`."""
        return max_tokens + self.num_spare

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> BufferSlot | None:
        """A slot with room for `max_tokens`, started from the prompt's longest cached prefix; None if it is full."""
        prompt.check_tokens(self)
        prompt.check_adapter(self)
        return self._cache.open(max_tokens + self.num_spare, prompt)

    def clear_prefixes(self) -> None:
        """Drop all cached prefixes that no open slot uses."""
        self._cache.clear()

    def evaluate(self, chunks: Sequence[Chunk]) -> BufferStep:
        """The rows of the chunks, which are chains."""
        sizes = [self.capabilities.rows.logits(chunk.num_rows) for chunk in chunks]
        if len(self._rows) < sum(sizes):
            self._rows = np.empty((sum(sizes), self.logits_width), dtype=self._logits_kind)
        wanted: dict[Chunk, range] = {}
        hidden: dict[Chunk, list[NDArray[np.float32]]] = {}
        at = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            count = len(chunk.token_ids)
            begin = max(count - size, 0)
            hidden[chunk] = self._run(chunk, begin, self._rows[at : at + size])
            wanted[chunk] = range(at + count - chunk.num_rows - begin, at + count - begin)
            at += size
        return BufferStep(self._rows, wanted, self.vocab_size, hidden)

    def _run(self, chunk: Chunk, begin: int, rows: NDArray[Any]) -> list[NDArray[np.float32]]:
        """Evaluate one chunk, and return the hidden states that it asks for, float32 [n, width] each.

        The logits from token `begin` on go to `rows`, float [rows, logits width].
        """
        slot, count = chunk.slot, len(chunk.token_ids)
        rule = self.capabilities.rows
        padded = max(rule.num_rows([count]), len(rows))
        num_extra = rule.sequence(padded) - padded if rule.apart else 0  # rows that the attention alone sees
        total = slot.length + padded + num_extra
        slot.has_written(total)
        if total > self._ones.shape[1]:
            self._ones = np.ones((1, max(2 * total, 1024)), dtype=np.int64)
        token_ids = np.zeros((1, padded), dtype=np.int64)
        token_ids[0, :count] = chunk.token_ids
        ends = np.array([begin, begin + len(rows)], dtype=np.int64)
        inputs = {
            "input_ids": token_ids,
            "attention_mask": self._ones[:, :total],
            _ROWS[0]: ends[:1],
            _ROWS[1]: ends[1:],
        }
        if num_extra:
            inputs[_EXTRA] = np.array([num_extra], dtype=np.int64)
        if self._has_positions:
            # Padding has the last token's position: the model's context may end there.
            positions = np.arange(slot.length, slot.length + padded, dtype=np.int64)
            inputs["position_ids"] = np.minimum(positions, slot.length + count - 1)[None]
        names = tuple(name for name in chunk.features if name in self._widths)  # of 6 layers, the third stands twice
        hidden = {name: np.empty((padded, self._widths[name]), dtype=np.float32) for name in names}
        binding = slot.binding(tuple(hidden))
        for name, values in inputs.items():
            binding.bind_input(name, "cpu", 0, np.int64, values.shape, values.ctypes.data)
        for name, values in {"logits": rows, **hidden}.items():
            binding.bind_output(name, "cpu", 0, values.dtype, (1, *values.shape), values.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise DeviceError(f"{self.device} failed: {one_line(error)}") from error
        slot.record(chunk.token_ids)
        return [hidden[name][:count] for name in names]

    def _check_in_place(self) -> None:
        """Validate, with two small calls, that the device updates the cache in the buffers that were bound.

        A provider may write to outputs of its own instead. Every call would then see an empty past.
        """
        if (slot := self.open(8)) is None:
            raise AssertionError("there is room before anything runs")
        whole, parts = self._try(slot, [1, 2, 3, 4], 2), self._try(slot, [3, 4], 2)
        slot.close()
        if not np.allclose(whole, parts, atol=0.05 * (float(np.ptp(whole)) or 1.0)):
            raise DeviceError(
                f"{self._provider.name} does not keep this model's cache in place on {self.device}, so nothing can be "
                "decoded. Use device CPU, or export the model to OpenVINO."
            )

    def _try(self, slot: BufferSlot, token_ids: list[int], num_rows: int) -> NDArray[np.float32]:
        """The logits of the last rows of a text of four tokens. Those before `token_ids` are in the cache."""
        slot.trim(4 - len(token_ids))
        chunk = Chunk(slot, token_ids, num_rows)
        return np.array([row.full() for row in self.evaluate([chunk]).rows(chunk)])


_ROWS, _EXTRA = ("rows_begin", "rows_end"), "extra_rows"
# Threads stop spinning when a call ends: the other model's call comes next.
_SESSION = {"session.force_spinning_stop": "1"}


def _session_options(num_threads: int, entries: Mapping[str, str]) -> ort.SessionOptions:
    pinned = entries.get("session.intra_op_thread_affinities")
    if pinned is not None and len(pinned.split(";")) != num_threads - 1:
        raise OptionError(
            f"session.intra_op_thread_affinities={pinned!r} pins {len(pinned.split(';'))} threads, and has to pin "
            f"num_threads - 1, all but the calling one, with num_threads={num_threads}. Set num_threads."
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 4  # errors are raised instead
    options.enable_mem_pattern = False  # shapes hardly repeat, and it would store a pattern for each
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    return options
