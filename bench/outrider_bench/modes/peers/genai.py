"""openvino-genai on the bundle's own files.

Its plain decoding, prompt lookup, and speculative decoding with the bundle's draft model: with a fixed number of draft
tokens, or as many as the draft model is confident of (`assistant_confidence_threshold`). EAGLE-3 and DFlash with the
bundle's drafters, which `bench/scripts/peer_draft.py` writes in its form. Each calculates in the
device's default, or in a precision that the mode names. Several requests at a time go through its
ContinuousBatchingPipeline.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from outrider.config import DeviceConfig, GenerationConfig
from outrider.decoding.metrics import Stats
from outrider_bench.modes.mode import AnsweredLoad, BatchMode, Load, Mode, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.check import default_precision, follow_options
from outrider_bench.modes.peers.known import DFLASH, DRAFT, EAGLE3, GENAI_DRAFTS, PEERS
from outrider_bench.modes.peers.link import link
from outrider_bench.modes.setup import Setup

_NUM_TOKENS = {DRAFT: 3, EAGLE3: 3}  # draft tokens a round; in other modes 5
DEFAULT_THRESHOLD = 0.4  # as in its samples
ALL_TOKENS = 2**64 - 1  # of a prompt in one call
_MICRO = 1e-6


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names, which share a pipeline."""
    pipeline = _Pipeline(names[0], setup)
    return [_Genai(name, pipeline) for name in names]


def load_together(names: list[ModeName], setup: Setup) -> list[BatchMode]:
    """The modes of these names for several requests at a time, which share a pipeline."""
    pipeline = _Pipeline(names[0], setup, together=True)
    return [_Together(name, pipeline) for name in names]


def _properties(device: DeviceConfig, precision: str) -> dict[str, Any]:
    properties: dict[str, Any] = dict(device.properties)
    if device.num_threads:
        properties["INFERENCE_NUM_THREADS"] = device.num_threads
    if precision or device.precision != "auto":
        properties["INFERENCE_PRECISION_HINT"] = precision or device.precision
    if device.cache_precision != "auto":
        properties["KV_CACHE_PRECISION"] = device.cache_precision
    return properties


class _Pipeline:
    """openvino-genai's LLMPipeline, with its default cache precision unless one was chosen.

    name: of one of its modes; without a precision it has the option's, or its default. together: use its
    ContinuousBatchingPipeline, with our cache size and our prompt tokens per call.
    """

    def __init__(self, name: ModeName, setup: Setup, *, together: bool = False) -> None:
        bundle, device, worker = setup.bundle, setup.config.device, PEERS[name.kind].worker
        self.eos_token_ids = set(bundle.manifest.tokenizer.eos_token_ids)
        properties = _properties(device.of("main"), name.precision)
        tokenizer = openvino_genai.Tokenizer(str(bundle.tokenizer_path))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = math.ceil(setup.config.scheduler.cache_size) if together else 1  # GB
        # Without a SchedulerConfig, an LLMPipeline reads a prompt in one call; with one, in pieces.
        scheduler.max_num_batched_tokens = setup.config.scheduler.max_num_batched_tokens if together else ALL_TOKENS
        scheduler.enable_prefix_caching = False  # as ours: every run reads its whole prompt
        extra: dict[str, Any] = {}
        weights = f"main model {bundle.manifest.main.weights}"
        if worker in GENAI_DRAFTS:
            draft_folder = setup.peer_models.get(worker)
            if draft_folder is None:
                drafter = setup.draft_models[0].model
                draft_folder = setup.draft_bundle.folder / drafter.folder
                weights += f", draft model {drafter.weights}"
            else:
                weights += f", draft model {draft_folder}"
            # It expects a tokenizer in the draft model's folder; ours is elsewhere.
            self._draft_folder = tempfile.TemporaryDirectory()
            # By name, as a second link to the same name would write into the first one's file.
            paths = {path.name: path for folder in (draft_folder, bundle.tokenizer_path) for path in folder.iterdir()}
            for name_there, path in paths.items():
                link(path, Path(self._draft_folder.name) / name_there)
            extra["draft_model"] = openvino_genai.draft_model(
                self._draft_folder.name,
                device.draft_device or device.main_device,
                **_properties(device.of("draft"), name.precision),
            )
        elif worker == "genai-ngram":
            extra["prompt_lookup"] = True
        main = str(bundle.folder / bundle.manifest.main.folder)
        if together:
            make = openvino_genai.ContinuousBatchingPipeline
            pipeline = make(main, tokenizer, scheduler, device.main_device, **extra, **properties)
        else:
            make = openvino_genai.LLMPipeline
            pipeline = make(main, tokenizer, device.main_device, scheduler_config=scheduler, **extra, **properties)
        self.pipeline = pipeline
        calculates = properties.get("INFERENCE_PRECISION_HINT") or f"its default ({default_precision(device) or '?'})"
        self.description = (
            f"the same files, {weights}, {device.main_device} {calculates}, "
            f"cache {'its default (8 bits on CPU)' if device.cache_precision == 'auto' else device.cache_precision}; "
            f"{device.num_threads or 'the default number of'} threads; openvino-genai {version('openvino-genai')}"
        )


class _Mode:
    """A pipeline, with a number of draft tokens or a threshold."""

    runtime, num_parallel = "openvino-genai", 1

    def __init__(self, name: ModeName, pipeline: _Pipeline) -> None:
        self.name, self.description = name.text, pipeline.description
        self._mode, self._pipeline = name, pipeline

    def _options(self, config: GenerationConfig) -> Any:
        """Our options in its form."""
        but = "temperature" if self._mode.kind == DFLASH else ""
        given = follow_options("genai", self.runtime, self.name, config, but=but)
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens = config.max_new_tokens
        options.stop_token_ids = self._pipeline.eos_token_ids | set(config.stop_token_ids)
        options.ignore_eos = config.ignore_eos
        options.stop_strings = set(given.pop("stop"))
        options.do_sample, options.rng_seed = config.temperature > 0, config.seed or 0
        for name, value in given.items():
            setattr(options, name, value)
        options.top_k = config.top_k or 2**31
        if self._mode.kind == "genai-dynamic":
            threshold = self._mode.number
            options.assistant_confidence_threshold = DEFAULT_THRESHOLD if threshold is None else threshold
        elif self._mode.kind != "genai":
            options.num_assistant_tokens = self._mode.num_assistant_tokens or _NUM_TOKENS.get(self._mode.kind, 5)
        if self._mode.kind == "genai-ngram":
            options.max_ngram_size = config.max_ngram_size
        return options


class _Genai(_Mode):
    """One request at a time."""

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""
        options = self._options(config)
        token_ids = np.array([prompt_token_ids], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(token_ids), ov.Tensor(np.ones_like(token_ids)))
        first: list[float] = []

        def streamer(_: str) -> Any:
            if not first:
                first.append(time.perf_counter())
            return openvino_genai.StreamingStatus.RUNNING

        began = time.perf_counter()
        answer = self._pipeline.pipeline.generate(inputs, options, streamer)
        total = time.perf_counter() - began
        metrics = answer.perf_metrics
        first_token = metrics.get_ttft().mean / 1e3 if metrics.get_ttft().mean > 0 else first[0] - began
        return Run(list(answer.tokens[0]), first_token, total, self._stats(answer, options, first_token, total))

    def _stats(self, answer: Any, options: Any, first_token: float, total: float) -> dict[str, Any]:
        """Rounds and accepted tokens, where it says so and the length of drafts is known; as our own modes'."""
        metrics = answer.extended_perf_metrics
        if self._mode.kind not in GENAI_DRAFTS or metrics is None:
            return {}
        stats = Stats(num_generated_tokens=len(answer.tokens[0]), time_to_first_token=first_token)
        main, draft = metrics.main_model_metrics.raw_metrics, metrics.draft_model_metrics.raw_metrics
        left = options.max_new_tokens - 1
        for num_tokens in list(main.m_batch_sizes)[1:]:  # the first call reads the prompt
            num_drafted = max(min(options.num_assistant_tokens, left - 1), num_tokens - 1)
            stats.count_round(range(num_drafted), num_tokens - 1)
            left -= num_tokens
        stats.decode_seconds = total - first_token
        stats.check_seconds = sum(list(main.m_durations)[1:]) * _MICRO
        stats.draft_seconds = sum(draft.m_durations) * _MICRO
        stats.host_seconds = max(stats.decode_seconds - stats.check_seconds - stats.draft_seconds, 0.0)
        return stats.as_dict()


class _Together(_Mode):
    """Several requests at a time."""

    def run(self, load: Load, config: GenerationConfig) -> AnsweredLoad:
        """Decode these prompts, so many at a time."""
        options, pipeline = self._options(config), self._pipeline.pipeline
        waiting = deque(enumerate(ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in load.prompts))
        running: dict[int, Any] = {}
        answers: dict[int, list[int]] = {}
        began = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < load.at_once:
                number, prompt = waiting.popleft()
                running[number] = pipeline.add_request(number, prompt, options)
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    answers[number] = list(running.pop(number).read_all()[0].generated_ids)
        return AnsweredLoad([answers[number] for number in sorted(answers)], time.perf_counter() - began)
