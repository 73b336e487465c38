"""The main model's own text, in large batches, with what a drafter learns from it.

    writer = Writer(read_bundle("my-bundle"), features=tap_names(30))
    tasks = [WritingTask(i, writer.tokenizer.encode_prompt(each)) for i, each in enumerate(prompts)]
    for text in writer.write(tasks, seed=0, max_new_tokens=256):
        text.token_ids, text.top_ids, text.features

Texts come from the model as it will run: a drafter learns the answers, and reads the hidden states, of the weights and
the precision that it will draft for. Calls are not padded to be exact, so that outside f32 the last bits of a row
depend on its company in the batch: answers are the model's own, but not bit for bit those of `Engine.generate`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.errors import BundleError, DeviceError, ExportError
from outrider.inputs.text import Tokenizer
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.tuning.loading import compile_settled
from outrider.models.tuning.model_spec import ModelSpec
from outrider.system.memory import system_memory
from outrider.types import Chunk, CompiledModel, Exactness
from outrider_distill.data import USUAL_PROMPT
from outrider_distill.texts import DistillText, Running, WritingTask

BATCH_SIZES = (16, 32, 64, 128)
PROMPT_TOKENS = 256  # of prompts, that one call reads
_MAX_PROMPT_TOKENS = 1024
_TRIAL_CONTEXT, _TRIAL_CALLS = 192, 4
_SPARE = 64  # tokens: of a cache's last block, or that padding may take
_WORTH = 1.05  # a larger batch takes more memory, and is chosen where it is so much faster
_GIGABYTE = 1e9
_UNKNOWN = 4.0  # GB for the cache if the system does not say how much memory is free
_LARGEST_HALF = 65504.0


class Writer:
    """Writes texts with a bundle's main model. Opens the model once; not for several threads.

    features: names of hidden states to keep. batch_size: texts written at the same time; None: the fastest of
    `BATCH_SIZES` up to `max_batch_size`, measured in a few calls. memory: GB for the KV cache, at most; None: half of
    what is free now.

    Raises:
        ExportError: for a model whose graph does not give these hidden states, too little memory, or
            answers as long as the model's context.
        BundleError, OptionError, DeviceError: as `outrider.load`.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        features: Sequence[str] = (),
        max_new_tokens: int = 256,
        batch_size: int | None = None,
        max_batch_size: int = BATCH_SIZES[-1],
        memory: float | None = None,
        device: DeviceConfig | None = None,
    ) -> None:
        self.features = tuple(features)
        self.tokenizer = Tokenizer(bundle.tokenizer_path)
        self.end_token_ids = frozenset(bundle.manifest.tokenizer.eos_token_ids)
        context = bundle.manifest.main.geometry.context_length
        self.max_prompt_tokens = min(_MAX_PROMPT_TOKENS, context - max_new_tokens)
        if self.max_prompt_tokens < 1:
            raise ExportError(
                f"max_new_tokens={max_new_tokens:,} leaves no room for a prompt in the main model's context of "
                f"{context:,} tokens. Lower it."
            )
        self._max_new_tokens = max_new_tokens
        self._backend = _open(bundle, self.features, device or DeviceConfig())
        sizes = tuple(size for size in BATCH_SIZES if size <= max_batch_size) or BATCH_SIZES[:1]
        self.batch_size = self._allocate((batch_size,) if batch_size else sizes, memory)

    @property
    def cache_bytes_per_text(self) -> float:
        """Bytes of the KV cache that a text of a usual prompt takes. Times the batch size: what the cache needs."""
        return (USUAL_PROMPT + self._max_new_tokens) * self._backend.bytes_per_token

    def write(
        self,
        tasks: Iterable[WritingTask],
        *,
        seed: int,
        max_new_tokens: int | None = None,
        stop: Container[int] | None = None,
        watch: Callable[[int], None] = lambda _: None,
    ) -> Iterator[DistillText]:
        """The texts, in the order in which they end. Ended ones are replaced at once: batches stay full.

        max_new_tokens: no more than the writer was made with. stop: tokens that end an answer; by default the model's
        own. watch: told after each call how many tokens it wrote.

        Raises:
            ExportError: for a prompt of more than `max_prompt_tokens`.
            DeviceError: when the device fails.
        """
        most = min(max_new_tokens or self._max_new_tokens, self._max_new_tokens)
        ends = self.end_token_ids if stop is None else stop
        waiting, running = _Waiting(iter(tasks)), list[Running]()
        try:
            while True:
                self._admit(waiting, running, most, seed)
                if not running:
                    return
                watch(self._call(running, ends))
                for each in [each for each in running if each.is_read]:
                    each.slot.close()
                    running.remove(each)
                    yield each.text()
        finally:
            for each in running:
                each.slot.close()

    def _admit(self, waiting: _Waiting, running: list[Running], max_new_tokens: int, seed: int) -> None:
        """Begin texts until the batch or the cache is full."""
        while len(running) < self.batch_size and (task := waiting.first) is not None:
            if not 0 < len(task.token_ids) <= self.max_prompt_tokens:
                raise ExportError(
                    f"The prompt of text {task.number} has {len(task.token_ids):,} tokens; it needs from 1 to "
                    f"{self.max_prompt_tokens:,}. Leave it out."
                )
            slot = self._backend.open(len(task.token_ids) + max_new_tokens)
            if slot is None:  # until others end
                return
            running.append(Running(task, slot, max_new_tokens, seed))
            waiting.advance()

    def _call(self, running: list[Running], ends: Container[int]) -> int:
        """One call of the model: the next token of each running text, and pieces of new ones' prompts."""
        parts = list(_chunks(running, self.features))
        step = self._backend.submit([chunk for _, chunk in parts]).wait()
        for each, chunk in parts:
            if self.features:
                states = step.features(chunk)
                each.keep(states.clip(-_LARGEST_HALF, _LARGEST_HALF, out=states).astype(np.float16))
            each.unread = each.unread[len(chunk.token_ids) :]
            for row in step.rows(chunk):
                each.go_on(row.full(), ends)
        return sum(chunk.num_rows for _, chunk in parts)

    def _allocate(self, sizes: Sequence[int], memory: float | None) -> int:
        """Allocate the cache for the fastest of these batch sizes that fit, and return it."""
        if memory is None:
            free = system_memory()[1]
            memory = _UNKNOWN if free is None else free / 2 / _GIGABYTE
        fitting = [size for size in sizes if size * self.cache_bytes_per_text <= memory * _GIGABYTE]
        if not fitting:
            raise ExportError(
                f"A batch of {sizes[0]} texts needs {sizes[0] * self.cache_bytes_per_text / _GIGABYTE:.2f} GB for the "
                f"KV cache, and {memory:.2f} GB may be used. Lower max_new_tokens or the batch size, or free memory."
            )
        batch_size = fitting[0]
        # What runs sequences one after the other, as ONNX Runtime, is as fast with few.
        if len(fitting) > 1 and isinstance(self._backend, OpenVINOPaged):
            self._backend.allocate(fitting[-1] * (_TRIAL_CONTEXT + 1 + self._backend.block_size))
            batch_size = _fastest({size: size / self._seconds(self._backend, size) for size in fitting})
        # Memory is taken when it is written to: room for long prompts costs nothing until there are some.
        longest = self.max_prompt_tokens + self._max_new_tokens + _SPARE
        most = int(memory * _GIGABYTE / self._backend.bytes_per_token)
        self._backend.allocate(max(longest, min(batch_size * longest, most)))
        return batch_size

    def _seconds(self, backend: OpenVINOPaged, batch_size: int) -> float:
        """The time of a call with so many texts: the shortest of some, after one that compiles kernels."""
        slots = [backend.open(_TRIAL_CONTEXT + 1) for _ in range(batch_size)]
        seconds = []
        for _ in range(1 + _TRIAL_CALLS):
            for slot in slots:
                if slot is None:
                    raise AssertionError("the cache was allocated for so many")
                slot.skip_to(_TRIAL_CONTEXT)
            began = time.perf_counter()
            backend.submit([Chunk(slot, [0], 1, self.features, generated=True) for slot in slots]).wait()
            seconds.append(time.perf_counter() - began)
        for slot in slots:
            if slot is not None:
                slot.close()
        return min(seconds[1:])


class _Waiting:
    """Tasks in their order; the first one is looked at before it is taken."""

    def __init__(self, tasks: Iterator[WritingTask]) -> None:
        self._tasks = tasks
        self.first: WritingTask | None = next(self._tasks, None)

    def advance(self) -> None:
        """Take the first one."""
        self.first = next(self._tasks, None)


def _chunks(running: list[Running], features: tuple[str, ...]) -> Iterator[tuple[Running, Chunk]]:
    """What the next call reads: the newest token of each text, and of prompts as many as one call may have."""
    room = PROMPT_TOKENS
    for each in running:
        is_prompt = not each.answer
        piece = each.unread[:room] if is_prompt else each.unread
        if not len(piece):
            continue
        room -= len(piece) if is_prompt else 0
        wanted = len(piece) == len(each.unread) and not each.reason
        yield each, Chunk(each.slot, piece, int(wanted), features, generated=not is_prompt)


def _fastest(speeds: dict[int, float]) -> int:
    """The batch size to choose. speeds: tokens a second by batch size, ascending."""
    best = next(iter(speeds))
    for size, speed in itertools.islice(speeds.items(), 1, None):
        best = size if speed > _WORTH * speeds[best] else best
    return best


def _open(bundle: Bundle, features: tuple[str, ...], device: DeviceConfig) -> CompiledModel:
    """The main model in the setting in which engines run it, without padding."""
    part = ModelSpec("main", bundle, bundle.manifest.main, None, features).on(device.main_device, device)
    try:
        _, backend = compile_settled(part)
    except BundleError as error:
        if not features:
            raise
        raise ExportError(
            f"{bundle.folder} does not give the hidden states that such drafters read: {error} "
            "Choose a kind that reads none: a draft model."
        ) from error
    if backend.capabilities.fixed:
        raise DeviceError(f"{device.main_device} runs one text at a time. Write with main_device='CPU' or 'GPU'.")
    backend.use(Exactness())
    return backend
