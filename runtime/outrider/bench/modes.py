"""Ways to decode that can be compared: our own, and those of openvino-genai on the same files.

A mode is written KIND[:N], with N draft tokens a round::

    plain   draft:3   ngram:5   shuffled:8   genai   genai-draft:3   genai-ngram:5

shuffled is for tests of identity: at random every round, one of the drafters or none, and up to N tokens.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.bench.shuffled import Shuffled
from outrider.config import LOSSY, GenerationConfig
from outrider.errors import OptionError, nearest

if TYPE_CHECKING:
    from outrider.engine import Engine

# It has no_repeat_ngram_size, which only beam search follows, and logprobs of one token at a place.
_NOT_IN_GENAI = ("typical_p", "logit_bias", "no_repeat_ngram_size", "banned_token_ids", "logprobs")

KINDS = ("plain", "draft", "ngram", "suffix", "shuffled", "genai", "genai-draft", "genai-ngram")


@dataclass(frozen=True, slots=True)
class Run:
    """One request in one mode. Seconds are wall time; total_seconds starts before the prompt is read."""

    token_ids: list[int]
    first_token_seconds: float
    total_seconds: float
    stats: dict[str, Any] = field(default_factory=dict)  # of our own modes

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second after the first token."""
        seconds = self.total_seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / seconds if len(self.token_ids) > 1 and seconds > 0 else 0.0


class Mode(Protocol):
    """One way to decode."""

    name: str
    runtime: str
    num_parallel: int  # runs that may go on at a time

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""


def make_modes(names: list[str], engine: Engine) -> list[Mode]:
    """The modes of these names, on the engine's bundle, device and precision.

    Raises:
        OptionError: for a name that is not of the form above, or names a drafter that the bundle does not have.
    """
    modes: list[Mode] = []
    pipelines: dict[str, _Pipeline] = {}  # modes of one kind share what they load
    for name in names:
        kind, _, number = name.partition(":")
        if kind not in (*KINDS, *engine.drafters) or (number and not number.isdigit()):
            raise OptionError(f"There is no mode '{name}': write KIND or KIND:N. {nearest(kind, KINDS)}")
        if kind.endswith("draft") and not engine.bundle.manifest.drafters:
            raise OptionError(f"Mode '{name}' needs a draft model, and {engine.bundle.folder} has none.")
        if kind == "genai-draft" and engine.bundle.manifest.drafters[0].vocabulary != "same":
            raise OptionError(f"openvino-genai cannot run mode '{name}': the draft model's vocabulary is another.")
        count = int(number) if number else None
        if kind.startswith("genai"):
            if kind not in pipelines:
                pipelines[kind] = _Pipeline(kind, engine)
            modes.append(_Genai(name, count, pipelines[kind]))
        else:
            modes.append(_Ours(name, kind, count, engine))
    return modes


class _Ours:
    runtime, num_parallel = "outrider", 8

    def __init__(self, name: str, kind: str, num_assistant_tokens: int | None, engine: Engine) -> None:
        self.name = name
        self._drafter = None if kind == "plain" else kind
        self._num_assistant_tokens = num_assistant_tokens
        self._engine = engine
        if kind == "shuffled" and kind not in engine.drafters:
            engine.add_drafter(kind, Shuffled([engine.find_drafter(drafter) for drafter in engine.drafters]))

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        began = time.perf_counter()
        config = config.replace(drafter=self._drafter)
        if self._num_assistant_tokens is not None:
            config = config.replace(num_assistant_tokens=self._num_assistant_tokens)
        result = self._engine.generate(prompt_token_ids, config)
        total = time.perf_counter() - began
        return Run(result.token_ids, result.stats.time_to_first_token, total, result.stats.as_dict())


class _Pipeline:
    """openvino-genai's LLMPipeline on the bundle's own files, with its default cache unless one was chosen."""

    def __init__(self, kind: str, engine: Engine) -> None:
        import openvino_genai

        self.kind = kind
        bundle, device = engine.bundle, engine.config.device
        self.eos_token_ids = set(bundle.manifest.tokenizer.eos_token_ids)
        properties: dict[str, Any] = dict(device.properties)
        if device.num_threads:
            properties["INFERENCE_NUM_THREADS"] = device.num_threads
        if device.precision != "auto":
            properties["INFERENCE_PRECISION_HINT"] = device.precision
        if device.cache_precision != "auto":
            properties["KV_CACHE_PRECISION"] = device.cache_precision
        tokenizer = openvino_genai.Tokenizer(str(bundle.tokenizer_path))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False  # as ours: every run reads its whole prompt
        extra: dict[str, Any] = {"scheduler_config": scheduler}
        if kind == "genai-draft":
            # It reads a tokenizer from beside the draft model; ours stands apart.
            self._draft_folder = tempfile.TemporaryDirectory()
            for folder in (bundle.folder / bundle.manifest.drafters[0].model.folder, bundle.tokenizer_path):
                for path in folder.iterdir():
                    _link(path, Path(self._draft_folder.name) / path.name)
            extra["draft_model"] = openvino_genai.draft_model(
                self._draft_folder.name, device.draft_device or device.main_device, **properties
            )
        elif kind == "genai-ngram":
            extra["prompt_lookup"] = True
        folder = bundle.folder / bundle.manifest.main.folder
        self.generate = openvino_genai.LLMPipeline(
            str(folder), tokenizer, device.main_device, **extra, **properties
        ).generate


class _Genai:
    """openvino-genai, with a number of draft tokens."""

    runtime, num_parallel = "openvino-genai", 1

    def __init__(self, name: str, num_assistant_tokens: int | None, pipeline: _Pipeline) -> None:
        import openvino as ov
        import openvino_genai

        self.name = name
        self._genai, self._tensor = openvino_genai, ov.Tensor
        self._pipeline, self._kind = pipeline, pipeline.kind
        self._num_assistant_tokens = num_assistant_tokens or (3 if self._kind == "genai-draft" else 5)

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        missing = [name for name in _NOT_IN_GENAI if getattr(config, name) != getattr(GenerationConfig(), name)]
        if config.sampling in LOSSY:
            missing.append(f"sampling='{config.sampling}'")
        if missing:
            raise OptionError(
                f"openvino-genai has no {missing[0]} here, so mode '{self.name}' cannot be compared with it. "
                "Leave the option or the mode out."
            )
        options = self._genai.GenerationConfig()
        options.max_new_tokens = config.max_new_tokens
        options.stop_token_ids = self._pipeline.eos_token_ids | set(config.stop_token_ids)
        options.ignore_eos = config.ignore_eos
        options.min_new_tokens = config.min_new_tokens
        options.stop_strings = set(config.stop)
        options.repetition_penalty = config.repetition_penalty
        options.presence_penalty = config.presence_penalty
        options.frequency_penalty = config.frequency_penalty
        if config.temperature:
            options.do_sample = True
            options.temperature, options.top_p = config.temperature, config.top_p
            options.top_k = config.top_k or 2**31
            options.min_p = config.min_p
            options.rng_seed = config.seed or 0
        if self._kind != "genai":
            options.num_assistant_tokens = self._num_assistant_tokens
        if self._kind == "genai-ngram":
            options.max_ngram_size = config.max_ngram_size
        token_ids = np.array([prompt_token_ids], dtype=np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(token_ids), self._tensor(np.ones_like(token_ids)))
        first: list[float] = []

        def streamer(_: str) -> Any:
            if not first:
                first.append(time.perf_counter())
            return self._genai.StreamingStatus.RUNNING

        began = time.perf_counter()
        answer = self._pipeline.generate(inputs, options, streamer)
        total = time.perf_counter() - began
        metrics = answer.perf_metrics
        first_token = metrics.get_ttft().mean / 1e3 if metrics.get_ttft().mean > 0 else first[0] - began
        return Run(list(answer.tokens[0]), first_token, total)


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(path, target)
