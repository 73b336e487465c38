"""The main model's own text, on a GPU that PyTorch finds: as the writer for OpenVINO, hundreds of texts at once.

    writer = open_writer(bundle, features=tap_names(30))

A batch is read, and written token by token until its last text has ended; a step is one CUDA graph. Weights are those
of the bundle, unpacked to bf16: texts are the model's own but for rounding. Before it is used, the model on the GPU is
compared with the bundle's own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.errors import DeviceError, OutriderError
from outrider.models.backends.taps import LAST
from outrider.types import Noise
from outrider_distill.main_model import read_layers, read_teacher
from outrider_distill.texts import LEAST, NUM_KEPT, DistillText, WritingTask
from outrider_distill.torch_main import TorchMain
from outrider_distill.writer import LARGEST_HALF, MAX_PROMPT_TOKENS, TextWriter, Writer

BATCH_SIZE = 512
_WIDTHS = (64, 128, 256, 512, MAX_PROMPT_TOKENS)  # of prompts: each needs a graph of its own
_READ_ROWS = 64  # prompts that are read at a time
_CACHE_SHARE = 0.4  # of the free memory
_TRIED, _TRIED_TOKENS = "Write a short story about a lighthouse.", 24
_MOST_DIFFERENT = 0.1  # of the last hidden states, relative: rounding makes a few hundredths, another model about 1
_TIMED_PROMPT, _TIMED_ANSWER = 64, 64  # tokens


def open_writer(bundle: Bundle, *, device: DeviceConfig | None = None, **options: Any) -> TextWriter:
    """A `GpuWriter` where there is a GPU that calculates what the bundle does, and `Writer` elsewhere.

    For the options and the errors, see `Writer`. max_batch_size and memory are not for GPUs; a device is one of
    OpenVINO's.
    """
    for_gpu = {name: options[name] for name in ("features", "max_new_tokens", "batch_size") if name in options}
    found = _on_gpu(bundle, **for_gpu) if device is None else None
    return found or Writer(bundle, device=device, **options)


def gpu_speed(bundle: Bundle) -> float | None:
    """Tokens per second that a GPU writes with the bundle's main model; None without a GPU that can."""
    if (writer := _on_gpu(bundle, max_new_tokens=_TIMED_ANSWER)) is None:
        return None
    tasks = [WritingTask(i, [0] * _TIMED_PROMPT) for i in range(writer.batch_size)]
    for _ in range(2):  # the first one makes kernels ready
        began, written = time.perf_counter(), list[int]()
        for _ in writer.write(tasks, seed=0, stop=(), watch=written.append):
            pass
    return sum(written) / (time.perf_counter() - began)


class GpuWriter(TextWriter):
    """Writes texts with a bundle's main model in PyTorch, as `Writer` does. Not for several threads.

    features: names of hidden states to keep. batch_size: texts written at the same time; None: as many as the memory
    has room for, up to 512. device, dtype: of the weights; by default the GPU and bf16.

    Raises:
        ExportError: for a model whose weights are not found, or answers as long as the model's context.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        features: Sequence[str] = (),
        max_new_tokens: int = 256,
        batch_size: int | None = None,
        device: Any = None,
        dtype: Any = torch.bfloat16,
    ) -> None:
        super().__init__(bundle, features, max_new_tokens)
        place = device or torch.device("cuda")
        self._main = TorchMain(read_teacher(bundle), read_layers(bundle), features, place, dtype)
        self.batch_size = batch_size or self._largest_batch()
        self._batch: _Batch | None = None  # the latest, whose memory and graph are used again

    def _write(
        self, tasks: Iterator[WritingTask], seed: int, most: int, ends: Container[int], watch: Callable[[int], None]
    ) -> Iterator[DistillText]:
        """Batch by batch; texts that loop are written to their end."""
        while batch := list(itertools.islice(tasks, self.batch_size)):
            for task in batch:
                self._check(task)
            yield from self._write_batch(batch, seed, most, ends, watch)

    def agrees(self, bundle: Bundle) -> bool:
        """Whether the model here calculates what the bundle's own does, on a short text of the latter."""
        try:
            right = Writer(bundle, features=(LAST,), max_new_tokens=_TRIED_TOKENS, batch_size=1)
            task = WritingTask(0, self.tokenizer.encode_prompt(_TRIED))
            (text,) = right.write([task], seed=0)
        except OutriderError:
            return False
        token_ids = torch.from_numpy(text.token_ids.astype(np.int64)).to(self._main.device)[None]
        found = self._main.read(token_ids, self._main.new_cache(1, token_ids.shape[1]))[LAST][0].float()
        wanted = torch.from_numpy(np.asarray(text.features, dtype=np.float32)).to(found)
        return bool((found - wanted).norm() <= _MOST_DIFFERENT * wanted.norm())

    def _write_batch(
        self, tasks: list[WritingTask], seed: int, most: int, ends: Container[int], watch: Callable[[int], None]
    ) -> Iterator[DistillText]:
        try:
            batch = self._prepared(tasks)
            batch.begin(tasks, seed)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"The GPU has no room for {self.batch_size} texts at a time. Free its memory, or set "
                "CUDA_VISIBLE_DEVICES to nothing, so that the CPU writes and trains."
            ) from error
        answers: list[list[int]] = [[] for _ in tasks]
        reasons = [""] * len(tasks)
        for place in range(most + 1):
            if place < most and not all(reasons):
                chosen, written = batch.chosen(), 0
                for row, token_id in enumerate(chosen[: len(tasks)]):
                    if reasons[row]:
                        continue
                    written += 1
                    answers[row].append(token_id)
                    reasons[row] = "stop" if token_id in ends else "length" if place + 1 == most else ""
                watch(written)
            if place == max(map(len, answers)):
                break
            batch.go_on()
        yield from batch.texts(tasks, answers, reasons)

    def _prepared(self, tasks: Sequence[WritingTask]) -> _Batch:
        """Memory for these texts; that of the batch before, where it fits."""
        longest = max(len(task.token_ids) for task in tasks)
        width = next(each for each in _WIDTHS if each >= longest)
        num_rows = min(self.batch_size, 1 << (len(tasks) - 1).bit_length())
        sizes = num_rows, width, self._max_new_tokens
        if self._batch is None or self._batch.sizes != sizes:
            self._batch = None  # frees its memory first
            self._batch = _Batch(self._main, self.features, sizes)
        return self._batch

    def _largest_batch(self) -> int:
        """As many texts as the device has room for, a power of two."""
        s, main = self._main.shape, self._main
        if main.device.type != "cuda":
            return 8
        length = self.max_prompt_tokens + self._max_new_tokens
        cached = 2 * s.num_layers * s.num_kv_heads * s.head_size * main.dtype.itemsize
        free = _CACHE_SHARE * torch.cuda.mem_get_info()[0]
        num_rows = int(free / (length * (cached + 2 * len(self.features) * s.hidden_size)))
        return min(BATCH_SIZE, 1 << max(num_rows.bit_length() - 1, 0))


def _on_gpu(bundle: Bundle, **options: Any) -> GpuWriter | None:
    """A writer on the GPU; None if there is none, or it does not run this model."""
    if not torch.cuda.is_available():
        return None
    try:
        writer = GpuWriter(bundle, **options)
    except (OutriderError, torch.OutOfMemoryError):
        return None
    return writer if writer.agrees(bundle) else None


class _Batch:
    """A batch of texts on the device. sizes: rows, places for prompts, and tokens of answers."""

    def __init__(self, main: TorchMain, features: tuple[str, ...], sizes: tuple[int, int, int]) -> None:
        self.sizes, self._main, self._features = sizes, main, features
        num_rows, width, most = sizes
        whole = {"device": main.device, "dtype": torch.int64}
        self._cache = main.new_cache(num_rows, width + most)
        self._token_ids, self._positions = torch.zeros(num_rows, **whole), torch.zeros(num_rows, **whole)
        self._place = torch.zeros(1, **whole)  # of the answer: how many tokens were chosen
        self._temperatures = torch.zeros(num_rows, 1, device=main.device)
        self._uniforms = torch.zeros(num_rows, most + 1, device=main.device)
        half = {"device": main.device, "dtype": torch.float16}
        size = len(features) * main.shape.hidden_size
        self._prompt_states = torch.zeros(num_rows, width, size, **half)
        self._states = torch.zeros(num_rows, most + 1, size, **half)
        self._top_ids = torch.zeros(num_rows, most + 1, NUM_KEPT, device=main.device, dtype=torch.int32)
        self._top_probs = torch.zeros(num_rows, most + 1, NUM_KEPT, **half)
        self._is_finite = torch.ones((), dtype=torch.bool, device=main.device)
        self._graph = self._capture() if main.device.type == "cuda" else None

    def begin(self, tasks: Sequence[WritingTask], seed: int) -> None:
        """Read the prompts, and choose the first tokens."""
        num_rows, _, most = self.sizes
        lengths = torch.ones(num_rows, dtype=torch.int64)
        prompts = torch.zeros(num_rows, max(len(task.token_ids) for task in tasks), dtype=torch.int64)
        self._temperatures.zero_()
        for row, task in enumerate(tasks):
            lengths[row] = len(task.token_ids)
            prompts[row, : len(task.token_ids)] = torch.as_tensor(task.token_ids)
            if task.temperature:
                self._temperatures[row] = task.temperature
                uniforms = Noise(seed, task.number).uniforms(0, "answer", most)
                self._uniforms[row, :most] = torch.from_numpy(uniforms).to(self._uniforms)
        prompts, lengths = prompts.to(self._main.device), lengths.to(self._main.device)
        ends = []
        for start in range(0, num_rows, _READ_ROWS):
            rows = slice(start, start + _READ_ROWS)
            states = self._main.read(prompts[rows], self._cache[:, :, rows])
            self._prompt_states[rows, : prompts.shape[1]] = self._joined(states)
            last = lengths[rows, None, None] - 1
            ends.append(states[LAST].gather(1, last.expand(-1, 1, self._main.shape.hidden_size))[:, 0])
        self._positions.copy_(lengths)
        self._place.zero_()
        self._is_finite.fill_(True)
        self._choose(torch.cat(ends))

    def chosen(self) -> list[int]:
        """The newest token of each row."""
        found: list[int] = self._token_ids.tolist()
        return found

    def go_on(self) -> None:
        """Read the newest tokens, and choose the next ones."""
        if self._graph is None:
            self._advance()
        else:
            self._graph.replay()

    def texts(
        self, tasks: Sequence[WritingTask], answers: Sequence[Sequence[int]], reasons: Sequence[str]
    ) -> Iterator[DistillText]:
        """The finished texts.

        Raises:
            DeviceError: when logits were not finite.
        """
        if not bool(self._is_finite):
            raise DeviceError(
                "The main model's logits are not finite. Check the bundle with 'outrider inspect --check'."
            )
        for row, (task, answer, reason) in enumerate(zip(tasks, answers, reasons, strict=True)):
            before, count = len(task.token_ids), len(answer)
            top_ids, top_probs = (each[row, :count].cpu().numpy() for each in (self._top_ids, self._top_probs))
            states = None
            if self._features:
                states = torch.cat([self._prompt_states[row, :before], self._states[row, :count]]).cpu().numpy()
            yield DistillText.of(task, answer, reason, (top_ids, top_probs), states)

    def _advance(self) -> None:
        states = self._main.step(self._token_ids, self._positions, self._cache)
        self._states.index_copy_(1, self._place - 1, self._joined(states))
        self._positions.add_(1)
        self._choose(states[LAST][:, 0])

    def _choose(self, last: Any) -> None:
        """Choose a token of each row by the state after the final norm [B, h], and keep the likeliest ones."""
        logits = self._main.logits(last)
        probs = logits.softmax(-1)
        top_probs, top_ids = probs.topk(min(NUM_KEPT, probs.shape[1]), -1)
        is_kept = top_probs > LEAST * top_probs[:, :1]
        count = top_ids.shape[1]
        self._top_ids[..., :count].index_copy_(1, self._place, torch.where(is_kept, top_ids, -1).int()[:, None])
        kept = torch.where(is_kept, top_probs, 0).to(self._top_probs)
        self._top_probs[..., :count].index_copy_(1, self._place, kept[:, None])
        sums = (logits / self._temperatures.clamp(min=1e-3)).softmax(-1).cumsum(-1)
        uniform = self._uniforms.index_select(1, self._place) * sums[:, -1:]
        drawn = torch.searchsorted(sums, uniform, right=True).clamp(max=sums.shape[1] - 1)
        self._token_ids.copy_(torch.where(self._temperatures > 0, drawn, top_ids[:, :1])[:, 0])
        self._is_finite.logical_and_(top_probs[:, 0].isfinite().all())
        self._place.add_(1)

    def _joined(self, states: dict[str, Any]) -> Any:
        """The wanted states side by side, float16 [B, T, width]."""
        none = states[LAST][..., :0].float()  # of the right shape where no states are wanted
        found = torch.cat([none, *(states[name].float() for name in self._features)], -1)
        return found.clamp(-LARGEST_HALF, LARGEST_HALF).to(torch.float16)

    def _capture(self) -> Any:
        """`_advance` as a CUDA graph, after two steps that make kernels ready."""
        self._place.fill_(1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._place.fill_(1)
                self._positions.zero_()
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        self._place.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        return graph
