"""OpenVINO's NPU, by its wrapper NPUW: a stateful model in fixed shapes, read in windows of so many rows.

Emulated on a CPU: measured. NPU: written against NPUW's source (llm_infer_request.cpp); not verified on hardware.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.backends.call_end import CallEnd
from outrider.backends.npu_sizes import CACHE_KINDS, check_npu, find_sizes, npuw_properties
from outrider.backends.npu_window import Window, WindowPending, WindowSlot
from outrider.errors import BundleError, DeviceError, OptionError, one_line
from outrider.kv import PrefixCounts, num_common_tokens
from outrider.types import NO_PROMPT, CacheUse, Capabilities, Chunk, Exactness, FixedShape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider.types import Prompt


class OpenVINONpu:
    """One model in fixed shapes on an NPU: one to read prompts with, and one to decode with, on one cache.

        backend = OpenVINONpu(path, vocab_size=49_152, context_length=8_192, properties={"NPUW_DEVICES": "CPU"})
        backend.allocate(max_tokens=1_536)
        slot = backend.open(max_tokens=200)
        step = backend.submit([Chunk(slot, token_ids, num_rows=1)]).wait()
        step.row(0).full()    # float32 [vocab_size]

    Tokens whose rows are not wanted are a prompt: the prefill model reads them, in pieces. All others are evaluated by
    the other model, whose calls have `window` rows, however many are wanted: a call costs the same for one row as for
    all. Windows lie at fixed places, and one is evaluated whole each time, with padding behind its last token, which
    no token looks at. So a row's bits depend on the tokens before it, and on how many of them were the prompt, and
    neither on drafts nor on how a prompt was cut; rows on both sides of a window's end take two calls.

    NPUW counts the cache's tokens once a model, not once a request: there is one slot, and sequences take turns.

    properties: OpenVINO's and NPUW's. {"NPUW_DEVICES": "CPU"} emulates an NPU on the CPU. max_rows: rows that one call
    shall have room for. max_prompt_tokens, max_new_tokens: what there shall be room for; see `find_sizes`.

    Raises:
        OptionError: where there is no NPU and none is emulated, or for sizes that the model cannot have.
        BundleError: when the model cannot be read or is not a stateful decoder.
        DeviceError: when NPUW cannot compile it.
    """

    runtime = "OpenVINO NPUW"

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
        self._core = ov.Core()
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
        self.seconds = 0.0
        self._end = CallEnd(self._request)
        self._max_tokens = 0
        self._counts = PrefixCounts()
        self._open: WindowSlot | None = None
        # Tokens that the prefill model has read, and that the other one has not taken over; None where it has.
        self._prefilled: int | None = None
        self._prompt: list[int] = []  # what the prefill model has read, as far as it is in the cache
        self._scope = b""  # of that
        self.can_pad_apart = False
        self.use(Exactness())
        self.allocate(self.sizes.max_tokens)
        self._start()
        self.seconds = 0.0

    def use(self, exactness: Exactness) -> None:
        """From now on, claim what it says; calls have one size, so that there is nothing to pad."""
        fixed = FixedShape(self.sizes.window, self.sizes.prompt, self.sizes.max_tokens)
        self.exactness = exactness
        self.capabilities = Capabilities(bit_exact_batching=exactness.holds, one_call=False, fixed=fixed)

    def _read(self, model_path: Path) -> ov.Model:
        """The graph, and from it the geometry."""
        try:
            model = self._core.read_model(model_path)
        except RuntimeError as error:
            raise BundleError(
                f"{model_path} cannot be read by OpenVINO: {one_line(error)}. Export the bundle again."
            ) from error
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
        """What the device calculates in: an NPU in f16, a CPU in what it makes of what was asked for."""
        if not self._emulated_on:
            return "f16" if asked == "auto" else asked
        port = ops.parameter([1], np.float32)
        smallest = ov.Model([ops.result(ops.abs(port))], [port], "smallest")
        options = {} if asked == "auto" else {"INFERENCE_PRECISION_HINT": asked}
        compiled = self._core.compile_model(smallest, self._emulated_on, options)
        return str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())

    @property
    def fingerprint(self) -> dict[str, str]:
        """All besides the model that the time of a call depends on, and that can be asked for."""
        device = self._emulated_on or self.device
        found = {"device": self.device, "precision": self.precision, "openvino": ov.get_version()}
        for name in ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION", "INFERENCE_NUM_THREADS"):
            if name in self._core.get_property(device, "SUPPORTED_PROPERTIES"):
                found[name] = str(self._core.get_property(device, name))
        return found | {name: str(value) for name, value in self._properties.items()}

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can have."""
        return self._max_tokens

    @property
    def cache(self) -> CacheUse:
        """What is in the cache."""
        return CacheUse(
            num_tokens=self._max_tokens,
            bytes_per_token=self.bytes_per_token,
            num_used_tokens=self._max_tokens if self._open else 0,
            num_published_tokens=0 if self._open else len(self._prompt),
            num_evicted_tokens=0,
            **dataclasses.asdict(self._counts),
        )

    def allocate(self, max_tokens: int) -> None:
        """Set how many tokens there may be. The cache was made with the model: it takes none of what is left out."""
        self._max_tokens = min(max_tokens, self.sizes.max_tokens)

    def tokens_for(self, max_tokens: int) -> int:
        """What to give `allocate` so that a slot can have `max_tokens`."""
        return max_tokens

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> WindowSlot | None:
        """The slot, if it has room for `max_tokens`; None while it is open, or too small.

        Where `prompt`, which is going to be read, begins as the last one did, the slot has its whole pieces from the
        start: they have the bits that they would have if they were read again.
        """
        if self._open is not None or max_tokens > self._max_tokens:
            return None
        count, token_ids = 0, prompt.token_ids
        if token_ids and self._continues and prompt.scope == self._scope:
            read = token_ids[: self.sizes.window_begin(len(token_ids) - 1)]  # what the prefill model would read
            count = num_common_tokens(read, self._prompt)
        self._open = WindowSlot(self, token_ids[: count - count % self.sizes.piece], prompt.scope)
        if token_ids:
            self._counts.add(len(token_ids), self._open.length)
        return self._open

    def give_back(self, slot: WindowSlot) -> None:
        """A slot's room."""
        if self._open is slot:
            self._open = None

    def submit(self, chunks: Seq[Chunk]) -> WindowPending:
        """Evaluate chunks of the one sequence there is. Returns with the last window under way.

        Raises:
            DeviceError: when the device fails.
        """
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
        """Wait for the last window of a submit that began at `began`; its wanted rows."""
        rows = self._finish_window(window)
        self.seconds += self._end.seconds_since(began)
        return rows

    def run_in_background(self, wanted: bool) -> None:
        """Count a call's seconds until the device is done, though `wait` may come later. The last one of a submit is
        asynchronous anyway.
        """
        self._end.watch(wanted)

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._end.is_idle

    def end_prefill(self) -> None:
        """Let the decoding model begin anywhere, on a cache that holds nothing of use."""
        if self._prefilled is not None:
            self._start()

    def _start(self) -> None:
        """A call at position 0, which NPUW takes for where prompts begin if it is the first."""
        self._run(Window(WindowSlot(self), 0, 1, 1))

    def _prefill(self, slot: WindowSlot, end: int) -> None:
        """Have the prefill model read a prompt up to `end`, going on from what it has read.

        The decoding model has to begin exactly there: on its first call, NPUW copies the last piece to the wrong place
        if the cache was trimmed since.
        """
        end = min(end, self.sizes.longest_prefill)
        decoded = slot.num_stored > slot.num_read  # NPUW does not read on from there
        there = end <= slot.num_stored and self._prefilled in (None, end)
        if end < 2 or decoded or there:
            return
        begin = self._keep(slot, min(slot.num_read, end - 1))
        self._set(slot.token_ids[begin:end], begin, np.ones((1, end), dtype=np.int64))
        self._call(self._request.infer)
        slot.num_stored = slot.num_read = self._prefilled = end
        self._prompt, self._scope = slot.token_ids[:end], slot.scope

    def _keep(self, slot: WindowSlot, num_tokens: int) -> int:
        """Ask NPUW to go on from a prompt's first tokens; how many it keeps: those of whole pieces.

        It takes them from where the decoding model has them, which therefore has to be called in between.
        """
        if num_tokens < self.sizes.piece or not self._continues:
            return 0
        if self._prefilled is not None:
            self._run(Window(slot, self._prefilled, self._prefilled, self._prefilled))
        state = self._states["npuw_stored_tokens_state"]
        state.state = ov.Tensor(np.array([num_tokens], dtype=np.int64))
        return int(state.state.data[0])

    def _windows(self, slot: WindowSlot, first: int) -> list[Window]:
        """The windows that tokens are in which are not stored, or whose rows, from `first` on, are wanted."""
        windows: list[Window] = []
        if slot.num_stored == slot.length == first:
            return windows
        begin = self.sizes.window_begin(min(slot.num_stored, first))
        if self._prefilled not in (None, begin):  # trimmed too far to go on from the prompt
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
        # NPUW leaves what an earlier mask said of tokens that were trimmed: all of it is said each time.
        mask = np.zeros((1, past + count), dtype=np.int64)
        mask[0, :begin] = 1
        self._set(tokens + [0] * (count - len(tokens)), begin, mask)
        self._call(self._request.start_async)
        self._prefilled = None
        del self._prompt[begin:]  # written over
        window.slot.num_read = min(window.slot.num_read, begin)

    def _finish_window(self, window: Window) -> list[NDArray[Any]]:
        """The wanted rows, in the device's memory."""
        self._call(self._request.wait)
        logits = self._request.get_tensor("logits").data[0]
        behind = self.sizes.window_end(window.begin)  # the position behind the last row
        return [logits[position - behind] for position in range(window.first, window.end)]

    def _set(self, token_ids: Seq[int], begin: int, mask: NDArray[np.int64]) -> None:
        positions = np.arange(begin, begin + len(token_ids), dtype=np.int64)[None]
        self._request.set_tensor("input_ids", ov.Tensor(np.array([token_ids], dtype=np.int64)))
        self._request.set_tensor("position_ids", ov.Tensor(positions))
        self._request.set_tensor("attention_mask", ov.Tensor(mask))
        self._request.set_tensor("beam_idx", ov.Tensor(np.zeros(1, dtype=np.int32)))

    def _call(self, function: Any) -> None:
        try:
            function()
        except RuntimeError as error:
            raise DeviceError(f"{self.device} failed: {one_line(error)}") from error
