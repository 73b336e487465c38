"""OpenVINO with paged attention, on CPU and GPU.

GPU: written against the documented interface and openvino-genai's cache manager; not verified on hardware.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino as ov
from numpy.typing import NDArray

from outrider.config import PRECISIONS
from outrider.errors import DeviceError
from outrider.models.backends.adapters import ADAPTERS, Adapters
from outrider.models.backends.columns import append_columns, can_append, has_dependent
from outrider.models.backends.common import MeasuredBackend
from outrider.models.backends.devices import check_device, compile_error, facts_of, hints_of
from outrider.models.backends.divided import DividedCall, divide
from outrider.models.backends.embeds import EMBED_ROWS, EMBEDS, GRID, WHOLE, given_embeds, given_grid, given_whole
from outrider.models.backends.infer_calls import GraphState, InferCalls
from outrider.models.backends.paged_cache import PagedCache, blocks_to_allocate, tokens_per_row
from outrider.models.backends.paged_call import PagedCall
from outrider.models.backends.paged_graph import HIDDEN_IN, input_width, needs_all_rows, read_decoder
from outrider.models.backends.paged_slot import PagedSlot
from outrider.models.backends.paged_step import Outputs, PagedPending, PagedStep
from outrider.models.backends.paged_tensors import BoundInputs, bytes_of
from outrider.models.backends.processor import name_of, resolve_precisions
from outrider.models.backends.segments import Segments
from outrider.models.kv import NUM_FIXED, ROWS_PER_SEQUENCE, Prefixes
from outrider.system.core import new_core
from outrider.system.memory import release_pages
from outrider.types import (
    LONG_POSITION,
    NO_PROMPT,
    CacheUse,
    Capabilities,
    Chunk,
    Exactness,
    Pending,
    Prompt,
    Rounding,
    RowCost,
    RowRule,
    SteadyRows,
    answer_keys,
)

_ANY_SIZE = 32  # of blocks, if there is no cache
_STEADY_ROWS = 32  # more rows cost more than a change of their number
_FEW_THREADS = 2  # so many rows of padding are cheap


class OpenVINOPaged(MeasuredBackend):
    """One model, compiled for one device, with a KV cache in blocks.

        backend = OpenVINOPaged(path, device="CPU", vocab_size=49_152)
        backend.allocate(max_tokens=8_192)
        slot = backend.open(max_tokens=200)
        chunk = Chunk(slot, token_ids, num_rows=1)
        (row,) = backend.submit([chunk]).wait().rows(chunk)
        row.full()    # float32 [vocab_size]

    Several sequences of any lengths go in one call. Calls do not overlap: a step is read before the next `submit`.

    features: the outputs of hidden states that chunks may ask for. build: reads the model's file and makes
    its graph with a paged cache. cuts: the layers before which it is cut into segments; see `OpenVINOLayers`. adapters:
    those that `build` puts into the graph. columns: that products are widened to, if there are
    some; see `append_columns`. long_from: see `Capabilities`.

    Raises:
        OptionError: for a device that is not there.
        BundleError: when the model cannot be read, is not a stateful decoder or does not have these hidden states.
        DeviceError: when the device cannot compile it.
    """

    runtime = "OpenVINO"
    can_divide = True
    _long_from = 0
    _covers_all = True
    _unpacked: Path | None = None  # the file of weights that the first call packs

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
        build: Callable[[ov.Core, Path], ov.Model] = read_decoder,
        cuts: Collection[int] = (),
        adapters: Adapters | None = None,
        columns: int = 0,
        long_from: int = 0,
    ) -> None:
        core = new_core()
        check_device(core, device)
        model = build(core, model_path)
        self._covers_all = device != "CPU" or needs_all_rows(model)
        columns = columns if columns and can_append(model) else 0
        append_columns(model, columns)
        self.few_rows_differ = has_dependent(model)
        precision, cache_precision = resolve_precisions(core, device, precision, cache_precision)
        kinds = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": cache_precision}
        if cache_precision == "u8" and device.startswith("CPU"):  # not by channel, where a block's tokens share a scale
            kinds["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
        hints = hints_of(device, num_threads, properties, **kinds)
        try:
            compiled = (
                Segments.compile(core, model, cuts, device, hints) if cuts else core.compile_model(model, device, hints)
            )
        except (RuntimeError, TypeError) as error:
            raise compile_error(core, device, model_path.parent.name, error) from error
        self.columns, self._long_from = columns, long_from
        self._begin(core, compiled, device, vocab_size, tuple(features), adapters)
        self._unpacked = model_path.with_suffix(".bin")

    def _begin(
        self,
        core: ov.Core,
        compiled: Any,
        device: str,
        vocab_size: int,
        features: tuple[str, ...] = (),
        adapters: Adapters | None = None,
        graph: GraphState | None = None,
    ) -> None:
        """Make a request of a compiled model. graph: the state of the graph, if it is another model's, too."""
        self.adapters = adapters
        self.core, self._compiled = core, compiled
        self.device, self.vocab_size = device, vocab_size
        self.logits_width: int = compiled.output("logits").get_partial_shape()[2].get_length()
        self._request = compiled.create_infer_request()
        self.graph = graph or GraphState(device)
        self._calls = InferCalls(self._request, self.graph)
        self._outputs = Outputs(self._request, vocab_size, features)
        self._hidden_width = input_width(compiled, HIDDEN_IN)  # of the hidden states that it reads
        self._embeds_width = input_width(compiled, EMBEDS)  # of the embeddings that it reads instead of tokens
        self._caches = _ports_with(compiled, "_cache.")
        self._states = _ports_with(compiled, "_state_table.")
        self._names = {name for port in compiled.inputs for name in port.get_names()}
        # Tokens per block: 32 on CPU, 16 on GPU. Only the values have one shape on both: [blocks, heads, size, head].
        values = next((port for name, port in self._caches.items() if name.startswith("value_cache.")), None)
        self.block_size: int = _ANY_SIZE if values is None else values.partial_shape[2].get_length()
        self._cache: PagedCache | None = None
        self._bound = BoundInputs(self._request)
        self._chunks: Sequence[Chunk] = ()  # of the running call
        self._begins: list[int] = []  # of its chunks, in their slots
        self._places: dict[Chunk, Sequence[int]] = {}
        # The device may use another precision than the option, and properties may set another.
        self.precision = name_of(compiled.get_property("INFERENCE_PRECISION_HINT"))
        keys = next((port for name, port in self._caches.items() if name.startswith("key_cache.")), None)
        self.cache_precision = self.precision if keys is None else name_of(keys.get_element_type())
        # Rounded by channel, a block of keys ends with rows of scales: each write rounds the whole block again.
        has_scales = keys is not None and keys.partial_shape[2] != self.block_size
        self._rounds_blocks = has_scales and self.cache_precision not in PRECISIONS
        self.can = Capabilities(
            bit_exact_batching=False,
            features=features,
            trees=True,
            adapters=adapters.names if adapters else (),
            embeds_width=self._embeds_width,
            long_from=self._long_from,
            states=bool(self._states),
        )
        self.use(Exactness())

    @property
    def separate_rules(self) -> Sequence[RowRule]:
        """Rules that keep the CPU plugin from dividing a sequence's blocks among threads, which changes bits.

        It does so in calls that have fewer sequences than threads, each of one row (`PagedAttention`, as of OpenVINO
        2026.4). So calls have as many, or one sequence with two rows. None for a cache whose blocks are rounded as a
        whole: there, rows that are written to one block at the same time would round each other's numbers.
        """
        if self._rounds_blocks:
            return ()
        among = RowRule(separate=True, dummy_rows=2)
        num_threads = int(self.fingerprint.get("INFERENCE_NUM_THREADS", 1))
        if num_threads > _FEW_THREADS:
            return (among,)
        return RowRule(separate=True, call=Rounding(num_threads)), among

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the time of a call depends on besides the model, as far as it is known."""
        found = facts_of(self.core, self.device, self._compiled)
        cuts = {"cuts": ",".join(map(str, self.segments.cuts))} if self.segments else {}
        adapters = {"adapters": str(self.adapters.shapes)} if self.adapters else {}
        columns = {"columns": str(self.columns)} if self.columns else {}
        return found | cuts | adapters | columns | {"cache": self.cache_precision}

    @property
    def segments(self) -> Segments | None:
        """What it was compiled to, if it was cut."""
        return self._compiled if isinstance(self._compiled, Segments) else None

    @property
    def num_layers(self) -> int:
        """Layers that have a cache of their own, of keys and values or of states."""
        kinds = Counter(name.split(".")[0] for name in self._states)
        num_convolutions = kinds.pop("conv_state_table", 0)  # also in the layers of all other states
        return len(self._caches) // 2 + max(num_convolutions, sum(kinds.values()))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in the cache, over all layers; with its share of the rows of states."""
        of_states = sum(bytes_of(port, 1) for port in self._states.values())
        of_keys = sum(bytes_of(port, 1) for port in self._caches.values()) / self.block_size
        return of_keys + (of_states / self._tokens_per_row if of_states else 0)

    @property
    def _tokens_per_row(self) -> int:
        return tokens_per_row(self._caches, self._states, self.block_size)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence, without padding."""
        return max(self._cache.max_tokens - self.num_spare, 0) if self._cache else 0

    @property
    def cache(self) -> CacheUse:
        """Prefix-cache occupancy and hit statistics."""
        return self.paged_cache.use

    @property
    def paged_cache(self) -> PagedCache:
        """The cache, once it is allocated."""
        if self._cache is None:
            raise RuntimeError("call `allocate` first: it makes the cache")
        return self._cache

    @property
    def prefixes(self) -> Prefixes | None:
        """The prefix cache as `PrefixStore` uses it; None if it has no layers."""
        return self.paged_cache if self._caches else None

    def allocate(self, max_tokens: int) -> None:
        """Allocate a new cache, or on a device its first blocks.

        The old cache is freed. Other requests that were bound to it have to be bound again before their next call.
        """
        self._cache = PagedCache(
            self._caches,
            max(1, max_tokens // self.block_size),
            self.block_size,
            device=self.device,
            context=None if self.device.startswith("CPU") else self._compiled.get_context(),
            state_ports=self._states,
            num_rows=NUM_FIXED + max(max_tokens // self._tokens_per_row, ROWS_PER_SEQUENCE) if self._states else 0,
        )
        if self._caches:  # heads may have none
            self._cache.bind(self._request)

    def tokens_for(self, max_tokens: int) -> int:
        """The argument for `allocate` with which one slot can have `max_tokens`: whole blocks, and room to grow."""
        num_blocks = -(-(max_tokens + self.num_spare) // self.block_size)
        if self._states:
            num_blocks = max(num_blocks, -(-ROWS_PER_SEQUENCE * self._tokens_per_row // self.block_size))
        return blocks_to_allocate(num_blocks, len(self._caches), grows=self.paged_cache.grows) * self.block_size

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> PagedSlot | None:
        """A slot with room for `max_tokens`, started from the prompt's longest cached prefix; None if it is full."""
        if not self._hidden_width:  # hidden states have the embeds in them
            prompt.check_embeds(self)
        prompt.check_adapter(self)
        if self.capabilities.marks_answers:
            prompt = prompt.with_marked_answers()
        prompt = prompt.of_length(max_tokens, self._long_from)
        slot = self.paged_cache.open(max_tokens + self.num_spare, prompt)
        if slot is not None:
            slot.most_rows = self.capabilities.rows.most
            slot.first_position = LONG_POSITION if self._long_from and prompt.is_long else 0
        return slot

    def submit(self, chunks: Sequence[Chunk]) -> Pending:
        """Evaluate chunks in one call, padded by the rule of `capabilities.rows`, or in several if there are too many.

        Padding of a sequence is overwritten by its next tokens. Padding of the call goes to a block of its own.
        """
        calls = divide(chunks, self.capabilities.rows)
        return self._submit(chunks) if len(calls) == 1 else DividedCall(self._submit, calls)

    def _submit(self, chunks: Sequence[Chunk]) -> PagedPending:
        for chunk in chunks:
            chunk.slot.check_writable()
        inputs, places = self._inputs_of(chunks)
        for name, values in inputs.items():
            if name in self._names:  # a model without positions reads none
                self._bound.set(name, values)
        began = time.perf_counter()
        self._calls.start()
        self._begins = [chunk.slot.length for chunk in chunks]
        for chunk in chunks:
            self._append(chunk)
        self._chunks, self._places = chunks, places
        return PagedPending(self, began)

    def _inputs_of(self, chunks: Sequence[Chunk]) -> tuple[dict[str, NDArray[Any]], dict[Chunk, Sequence[int]]]:
        """The inputs of a call by name, and the rows of each chunk's tokens."""
        rule, steady = self.capabilities.rows, self.capabilities.steady
        if self._states:
            calls = [call for chunk in chunks for call in chunk.slot.plan(chunk)]
            with self.paged_cache.spare_rows(calls) as spare_row:
                call = PagedCall.of(chunks, rule, self.block_size, steady, spare_row, covers_all=self._covers_all)
        else:
            call = PagedCall.of(chunks, rule, self.block_size, steady)
        inputs = call.inputs()
        if self._hidden_width:
            inputs[HIDDEN_IN] = call.hidden_states(chunks, self._hidden_width)
        if self.adapters:
            inputs[ADAPTERS] = self.adapters.mask(call.adapters)
        if self._embeds_width:
            given = given_embeds(call.chains, len(call.token_ids), self._embeds_width)
            inputs |= zip((EMBEDS, EMBED_ROWS), given, strict=True)
        if GRID in self._names:
            inputs[GRID] = given_grid(call.chains, len(call.token_ids))
        if WHOLE in self._names:
            inputs[WHOLE] = given_whole(call.chains, len(call.token_ids))
        return inputs, call.places

    def clear_prefixes(self) -> None:
        """Drop all cached prefixes that no open slot uses."""
        self.paged_cache.clear()

    def keep_rows(self, cost: RowCost) -> None:
        """Pad calls further, as `SteadyRows` says, up to a block of idle rows."""
        steady = SteadyRows(cost, self.capabilities.rows, min(_STEADY_ROWS, self.block_size))
        self.capabilities = dataclasses.replace(self.capabilities, steady=steady)

    def _append(self, chunk: Chunk) -> None:
        """Record the tokens that a call writes to the cache."""
        is_marked = self.capabilities.marks_answers and chunk.generated
        token_ids = answer_keys(chunk.token_ids) if is_marked else chunk.token_ids
        chunk.slot.read(chunk.layout, token_ids)

    def run_in_background(self, wanted: bool) -> None:
        """Count a call's seconds until the device is done, even if `wait` comes later. Calls are asynchronous."""
        self._calls.watch(wanted)

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return self._calls.is_idle

    def finish(self, began: float) -> PagedStep:
        """Wait for the call that began at `began`; see `Pending.wait`."""
        try:
            self._calls.wait()
        except DeviceError:
            for chunk, begin in zip(self._chunks, self._begins, strict=True):
                chunk.slot.discard(begin, whole_blocks=self._rounds_blocks)
            raise
        self.seconds += self._calls.seconds_since(began)
        if self._unpacked is not None:
            release_pages(self._unpacked)
            self._unpacked = None
        return self._outputs.step(self._chunks, self._places)


def _ports_with(compiled: Any, part: str) -> dict[str, Any]:
    """The inputs of a compiled model that have a name with this part, by that name."""
    named = ((next((name for name in port.get_names() if part in name), None), port) for port in compiled.inputs)
    return {name: port for name, port in named if name is not None}
