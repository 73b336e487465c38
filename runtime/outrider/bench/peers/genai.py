"""openvino-genai on the bundle's own files.

Its plain decoding, prompt lookup, and speculative decoding with the bundle's draft model: with a fixed number of draft
tokens, or as many as the draft model is sure enough of (`assistant_confidence_threshold`).
"""

from __future__ import annotations

import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import openvino_genai

from outrider.bench.modes import ModeName, Run, Setup
from outrider.bench.peers import DRAFT, check_options, link

if TYPE_CHECKING:
    from outrider.bench.modes import Mode
    from outrider.config import DeviceConfig, GenerationConfig

DEFAULT_THRESHOLD = 0.4  # as its samples have it
# It has no_repeat_ngram_size, which only beam search follows, and logprobs of one token at a place.
_FOLLOWED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "stop",
)


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names; those of one kind share a pipeline."""
    pipelines = {worker: _Pipeline(worker, setup) for worker in {name.worker for name in names}}
    return [_Genai(name, pipelines[name.worker]) for name in names]


def _properties(device: DeviceConfig) -> dict[str, Any]:
    properties: dict[str, Any] = dict(device.properties)
    if device.num_threads:
        properties["INFERENCE_NUM_THREADS"] = device.num_threads
    if device.precision != "auto":
        properties["INFERENCE_PRECISION_HINT"] = device.precision
    if device.cache_precision != "auto":
        properties["KV_CACHE_PRECISION"] = device.cache_precision
    return properties


class _Pipeline:
    """openvino-genai's LLMPipeline with its default cache unless one was chosen."""

    def __init__(self, worker: str, setup: Setup) -> None:
        bundle, device = setup.bundle, setup.config.device
        self.eos_token_ids = set(bundle.manifest.tokenizer.eos_token_ids)
        properties = _properties(device.of("main"))
        tokenizer = openvino_genai.Tokenizer(str(bundle.tokenizer_path))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False  # as ours: every run reads its whole prompt
        extra: dict[str, Any] = {"scheduler_config": scheduler}
        weights = f"main model {bundle.manifest.main.weights}"
        if worker == "genai-draft":
            drafter = setup.drafters[0].model
            draft_folder = setup.peer_models.get(DRAFT, setup.draft_bundle.folder / drafter.folder)
            weights += f", draft model {drafter.weights if DRAFT not in setup.peer_models else draft_folder}"
            # It reads a tokenizer from beside the draft model; ours stands apart.
            self._draft_folder = tempfile.TemporaryDirectory()
            for folder in (draft_folder, bundle.tokenizer_path):
                for path in folder.iterdir():
                    link(path, Path(self._draft_folder.name) / path.name)
            extra["draft_model"] = openvino_genai.draft_model(
                self._draft_folder.name, device.draft_device or device.main_device, **_properties(device.of("draft"))
            )
        elif worker == "genai-ngram":
            extra["prompt_lookup"] = True
        folder = bundle.folder / bundle.manifest.main.folder
        self.generate = openvino_genai.LLMPipeline(
            str(folder), tokenizer, device.main_device, **extra, **properties
        ).generate
        self.description = (
            f"the same files, {weights}, {device.main_device} {_or_default(device.precision)}, "
            f"cache {_or_default(device.cache_precision, ' (8 bits on CPU)')}; "
            f"{device.num_threads or 'the default number of'} threads; openvino-genai {version('openvino-genai')}"
        )


class _Genai:
    """A pipeline, with a number of draft tokens or a threshold."""

    runtime, num_parallel = "openvino-genai", 1

    def __init__(self, name: ModeName, pipeline: _Pipeline) -> None:
        self.name, self.description = name.text, pipeline.description
        self._mode, self._pipeline = name, pipeline

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""
        check_options(self.runtime, self.name, config, _FOLLOWED)
        options = openvino_genai.GenerationConfig()
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
        if self._mode.kind == "genai-dynamic":
            threshold = self._mode.number
            options.assistant_confidence_threshold = DEFAULT_THRESHOLD if threshold is None else threshold
        elif self._mode.kind != "genai":
            default = 3 if self._mode.kind == "genai-draft" else 5
            options.num_assistant_tokens = self._mode.num_assistant_tokens or default
        if self._mode.kind == "genai-ngram":
            options.max_ngram_size = config.max_ngram_size
        token_ids = np.array([prompt_token_ids], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(token_ids), ov.Tensor(np.ones_like(token_ids)))
        first: list[float] = []

        def streamer(_: str) -> Any:
            if not first:
                first.append(time.perf_counter())
            return openvino_genai.StreamingStatus.RUNNING

        began = time.perf_counter()
        answer = self._pipeline.generate(inputs, options, streamer)
        total = time.perf_counter() - began
        metrics = answer.perf_metrics
        first_token = metrics.get_ttft().mean / 1e3 if metrics.get_ttft().mean > 0 else first[0] - began
        return Run(list(answer.tokens[0]), first_token, total)


def _or_default(precision: str, says: str = "") -> str:
    return f"its default{says}" if precision == "auto" else precision
