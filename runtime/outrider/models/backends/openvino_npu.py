"""OpenVINO's NPU through its wrapper NPUW: a stateful model in fixed shapes, decoded in windows of fixed size.

Emulated on a CPU: measured. NPU: written against NPUW's source (llm_infer_request.cpp); not verified on hardware.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.errors import BundleError, DeviceError, OptionError, one_line
from outrider.models.backends.attention import check_trimmable
from outrider.models.backends.common import MeasuredBackend
from outrider.models.backends.devices import facts_of, one_operator
from outrider.models.backends.infer_calls import GraphState, InferCalls
from outrider.models.backends.npu_sizes import CACHE_KINDS, check_npu, find_sizes, npuw_properties
from outrider.models.backends.npu_window import Window, WindowPending, WindowSlot
from outrider.models.backends.processor import name_of
from outrider.models.kv import PrefixCounts
from outrider.system.core import new_core
from outrider.types import NO_PROMPT, CacheUse, Capabilities, Chunk, Exactness, FixedShape, Prompt, num_common_tokens


class OpenVINONpu(MeasuredBackend):
    """One model in fixed shapes on an NPU. NPUW makes two of it, for prefill and for decoding, with one cache.

        backend = OpenVINONpu(path, vocab_size=49_152, context_length=8_192, properties={"NPUW_DEVICES": "CPU"})
        backend.allocate(max_tokens=1_536)
        slot = backend.open(max_tokens=200)
        chunk = Chunk(slot, token_ids, num_rows=1)
        (row,) = backend.submit([chunk]).wait().rows(chunk)
        row.full()    # float32 [vocab_size]

    The prefill model reads prompts in pieces: tokens whose rows are not wanted. The decoding model evaluates all other
    tokens. Its calls have `window` rows, and one row costs as much as all. Windows begin at fixed positions. Each is
    evaluated whole, with padding after its last token, which no token sees. So a row's bits depend on the tokens
    before it and on how many of them were the prompt, not on drafts nor on how the prompt was cut. Rows on both sides
    of a window's end take two calls.

    NPUW counts the cache's tokens once per model, not once per request. So there is one slot, and sequences take turns.

    properties: OpenVINO's and NPUW's. {"NPUW_DEVICES": "CPU"} emulates an NPU on the CPU. max_rows: the most rows of a
    call. max_prompt_tokens, max_new_tokens: see `find_sizes`.

    Raises:
        OptionError: when there is no NPU and none is emulated, or for sizes that the model cannot have.
        BundleError: when the model cannot be read or is not a stateful decoder.
        DeviceError: when NPUW cannot compile it.
    """

    runtime = "OpenVINO NPUW"
    graph: GraphState

    def __init__(
        self,
        model_path: Path,
        *,
        vocab_size: int,
        context_length: int,
        max_rows: int = 16,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        device: str = "NPU",
        precision: str = "auto",
        cache_precision: str = "auto",
        num_threads: int = 0,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        self._core = new_core()
        asked = dict(properties or {})
        self._emulated_on = check_npu(self._core, device, str(asked.get("NPUW_DEVICES", "")))
        self.device = f"{device} (emulated on {self._emulated_on})" if self._emulated_on else device
        self.sizes = find_sizes(max_rows, context_length, max_prompt_tokens, max_new_tokens)
        if cache_precision not in CACHE_KINDS:
            raise OptionError(f"cache_precision={cache_precision!r} is not for an NPU. Use {', '.join(CACHE_KINDS)}.")
        self.cache_precision = CACHE_KINDS[cache_precision]
        model = self._read(model_path)
        self._properties = npuw_properties(self.sizes, self.cache_precision, precision, num_threads, asked)
        try:
            self._compiled = self._core.compile_model(model, device, self._properties)
            self._request = self._compiled.create_infer_request()
        except (RuntimeError, TypeError) as error:
            raise DeviceError(f"{self.device} cannot compile {model_path.parent.name}: {one_line(error)}") from error
        self.precision = self._find_precision(precision)
        self._states = {state.name: state for state in self._request.query_state()}
        self._continues = bool(self._compiled.get_property("NPUW_LLM_CONTINUOUS_PREFILL_SUPPORTED"))
        self.vocab_size = vocab_size
        self.graph = GraphState(self.device)
        self._calls = InferCalls(self._request, self.graph)
        self._max_tokens = 0
        self._counts = PrefixCounts()
        self._open: WindowSlot | None = None
        # Tokens that only the prefill model has read so far; None once the decoding model has taken over.
        self._prefilled: int | None = None
        self._prompt: list[int] = []  # tokens that the prefill model has read and that are still in the cache
        self._scope = b""  # of these tokens
        fixed = FixedShape(self.sizes.window, self.sizes.prompt, self.sizes.max_tokens)
        self.can = Capabilities(bit_exact_batching=False, one_call=False, fixed=fixed)
        self.use(Exactness())
        self.allocate(self.sizes.max_tokens)
        self._start()
        self.seconds = 0.0

    def _read(self, model_path: Path) -> ov.Model:
        """Read the graph, and the geometry from it."""
        try:
            model = self._core.read_model(model_path)
        except RuntimeError as error:
            raise BundleError(
                f"{model_path} cannot be read by OpenVINO: {one_line(error)}. Export the bundle again."
            ) from error
        check_trimmable(model)
        caches = [variable.info for variable in model.get_variables()]
        shapes = [info.data_shape for info in caches]
        if not shapes or any(shape.rank.get_length() != 4 for shape in shapes):
            raise BundleError(f"{model_path} has no cache inside, so NPUW cannot run it. Export the bundle again.")
        self.num_layers = len(shapes) // 2
        bits = 32 if self.cache_precision == "f32" else 16
        self.bytes_per_token = sum(s[1].get_length() * s[3].get_length() for s in shapes) * bits / 8
        self.logits_width: int = model.output("logits").get_partial_shape()[2].get_length()
        return model

    def _find_precision(self, asked: str) -> str:
        """The precision that the device calculates in: f16 on an NPU, what the plugin reports on a CPU."""
        if not self._emulated_on:
            return "f16" if asked == "auto" else asked
        options = {} if asked == "auto" else {"INFERENCE_PRECISION_HINT": asked}
        compiled = self._core.compile_model(one_operator(), self._emulated_on, options)
        return name_of(compiled.get_property("INFERENCE_PRECISION_HINT"))

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the time of a call depends on besides the model, as far as it is known."""
        found = facts_of(self._core, self._emulated_on or self.device)
        found |= {"device": self.device, "precision": self.precision}
        return found | {name: str(value) for name, value in self._properties.items()}

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence."""
        return self._max_tokens

    @property
    def cache(self) -> CacheUse:
        """Prefix-cache occupancy and hit statistics."""
        return CacheUse(
            num_tokens=self._max_tokens,
            bytes_per_token=self.bytes_per_token,
            num_used_tokens=self._max_tokens if self._open else 0,
            num_published_tokens=0 if self._open else len(self._prompt),
            num_evicted_tokens=0,
            **dataclasses.asdict(self._counts),
        )

    def allocate(self, max_tokens: int) -> None:
        """Set how many tokens a sequence may have. The cache was allocated with the model and keeps its size."""
        self._max_tokens = min(max_tokens, self.sizes.max_tokens)

    def tokens_for(self, max_tokens: int) -> int:
        """The argument for `allocate` with which one slot can have `max_tokens`."""
        return max_tokens

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> WindowSlot | None:
        """The slot, if it has room for `max_tokens`; None while it is open, or if it is too small.

        If `prompt` begins like the last one, the slot starts with the whole pieces that they share. Reading these again
        would give the same bits.
        """
        prompt.check_tokens(self)
        prompt.check_adapter(self)
        if self._open is not None or max_tokens > self._max_tokens:
            return None
        count, token_ids = 0, prompt.token_ids
        if token_ids and self._continues and prompt.scope == self._scope:
            read = token_ids[: self.sizes.window_begin(len(token_ids) - 1)]  # the tokens the prefill model would read
            count = num_common_tokens(read, self._prompt)
        self._open = WindowSlot(self, token_ids[: count - count % self.sizes.piece], prompt.scope)
        if token_ids:
            self._counts.add(len(token_ids), self._open.length)
        return self._open

    def clear_prefixes(self) -> None:
        """Drop the last prompt, with which the next one could begin."""
        if self._open is None:
            self._prompt = []

    def give_back(self, slot: WindowSlot) -> None:
        """Take a slot's room back."""
        if self._open is slot:
            self._open = None

    def submit(self, chunks: Sequence[Chunk]) -> WindowPending:
        """Evaluate chunks of the one open sequence. Returns while the last window runs."""
        for chunk in chunks:
            chunk.check_chain(self)
        began = time.perf_counter()
        windows: list[Window] = []
        for chunk in chunks:
            slot: WindowSlot = chunk.slot
            slot.token_ids.extend(chunk.token_ids)
            first = slot.length - chunk.num_rows
            if chunk.num_rows:
                self._prefill(slot, self.sizes.window_begin(first))
            elif self._continues:
                self._prefill(slot, slot.length)
            elif not slot.num_stored:
                continue  # it is read with what follows
            windows += self._windows(slot, first)
            slot.num_stored = slot.length
        rows: list[NDArray[Any]] = []
        for window in windows[:-1]:
            self._start_window(window)
            rows += [row.copy() for row in self._finish_window(window)]
        if windows:
            self._start_window(windows[-1])
            return WindowPending(self, rows, windows[-1], began)
        self.seconds += time.perf_counter() - began
        return WindowPending(self, rows, None, began)

    def finish(self, window: Window, began: float) -> list[NDArray[Any]]:
        """Wait for the last window of a submit that began at `began`, and return its wanted rows."""
        rows = self._finish_window(window)
        self.seconds += self._calls.seconds_since(began)
        return rows

    def run_in_background(self, wanted: bool) -> None:
        """Count a call's seconds until the device is done, even if `wait` comes later.

        The last call of a submit is asynchronous in any case.
        """
        self._calls.watch(wanted)

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return self._calls.is_idle

    def end_prefill(self) -> None:
        """Let the decoding model begin at any position. The cache's content is lost."""
        if self._prefilled is not None:
            self._start()

    def _start(self) -> None:
        """Make a call at position 0. NPUW takes the first call's position for where prompts begin."""
        self._run(Window(WindowSlot(self), 0, 1, 1))

    def _prefill(self, slot: WindowSlot, end: int) -> None:
        """Read a prompt up to `end` with the prefill model, starting from what it has read.

        The decoding model has to begin exactly at `end`. If the cache was trimmed in between, NPUW copies the last
        piece to a wrong position at the first decoding call.
        """
        end = min(end, self.sizes.window_begin(self.sizes.prefill))  # windows read the rest
        decoded = slot.num_stored > slot.num_read  # NPUW cannot continue prefill from there
        there = end <= slot.num_stored and self._prefilled in (None, end)
        if end < 2 or decoded or there:
            return
        begin = self._reuse_prefix(slot, min(slot.num_read, end - 1))
        self._set(slot.token_ids[begin:end], begin, np.ones((1, end), dtype=np.int64))
        with self.graph.calling():
            self._request.infer()
        slot.num_stored = slot.num_read = self._prefilled = end
        self._prompt, self._scope = slot.token_ids[:end], slot.scope

    def _reuse_prefix(self, slot: WindowSlot, num_tokens: int) -> int:
        """Let NPUW continue from a prompt's first tokens. Returns how many it reuses: those of whole pieces.

        NPUW copies them from the decoding model, which has to be called in between.
        """
        if num_tokens < self.sizes.piece or not self._continues:
            return 0
        if self._prefilled is not None:
            self._run(Window(slot, self._prefilled, self._prefilled, self._prefilled))
        state = self._states["npuw_stored_tokens_state"]
        state.state = ov.Tensor(np.array([num_tokens], dtype=np.int64))
        return int(state.state.data[0])

    def _windows(self, slot: WindowSlot, first: int) -> list[Window]:
        """The windows with tokens that are not stored, or with wanted rows: those from `first` on."""
        windows: list[Window] = []
        if slot.num_stored == slot.length == first:
            return windows
        begin = self.sizes.window_begin(min(slot.num_stored, first))
        if self._prefilled not in (None, begin):  # trimmed too far to continue from the prompt
            begin = 0
        while begin < slot.length:
            end = min(self.sizes.window_end(begin), slot.length)
            windows.append(Window(slot, begin, max(first, begin), end))
            begin = self.sizes.window_end(begin)
        return windows

    def _run(self, window: Window) -> None:
        self._start_window(window)
        self._finish_window(window)

    def _start_window(self, window: Window) -> None:
        begin, past = window.begin, self.sizes.past
        tokens = window.slot.token_ids[begin : window.end]
        count = self.sizes.window_end(begin) - begin
        # NPUW keeps an earlier mask for trimmed tokens, so the whole mask is set each time.
        mask = np.zeros((1, past + count), dtype=np.int64)
        mask[0, :begin] = 1
        self._set(tokens + [0] * (count - len(tokens)), begin, mask)
        self._calls.start()
        self._prefilled = None
        del self._prompt[begin:]  # overwritten
        window.slot.num_read = min(window.slot.num_read, begin)

    def _finish_window(self, window: Window) -> list[NDArray[Any]]:
        """The wanted rows, in the device's memory."""
        self._calls.wait()
        logits = self._request.get_tensor("logits").data[0]
        end = self.sizes.window_end(window.begin)  # the position after the last row
        return [logits[position - end] for position in range(window.first, window.end)]

    def _set(self, token_ids: Sequence[int], begin: int, mask: NDArray[np.int64]) -> None:
        positions = np.arange(begin, begin + len(token_ids), dtype=np.int64)[None]
        self._request.set_tensor("input_ids", ov.Tensor(np.array([token_ids], dtype=np.int64)))
        self._request.set_tensor("position_ids", ov.Tensor(positions))
        self._request.set_tensor("attention_mask", ov.Tensor(mask))
        self._request.set_tensor("beam_idx", ov.Tensor(np.zeros(1, dtype=np.int32)))
