"""Transformers with PyTorch on CPU, plain and with a draft model ("assisted generation").

On a checkpoint folder or a GGUF file, which it unpacks to floating point. It shows the usual starting point, and is not
a like-for-like comparison. optimum-intel would run the bundle's own files, but Transformers cannot trim the cache
inside its models. It gets the bundle's token ids, so the checkpoint must have its vocabulary.
"""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.config import GenerationConfig
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.check import check_vocabulary, follow_options
from outrider_bench.modes.setup import Setup

_IF_GREEDY = ("repetition_penalty", "no_repeat_ngram_size")  # the options that it follows at temperature 0


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names; the draft model is loaded if one of them uses it."""
    threads = setup.config.device.num_threads
    if threads:
        torch.set_num_threads(threads)
    path = setup.peer_models["transformers"]
    model = _load(path)
    check_vocabulary(path, model.config.vocab_size, setup, "a checkpoint")
    description = f"{path.name} unpacked to {_precision(model)}"
    draft_model = None
    if any(name.kind == "transformers-draft" for name in names):
        draft_path = setup.peer_models["transformers-draft"]
        draft_model = _load(draft_path)
        description += f", draft model {draft_path.name} to {_precision(draft_model)}"
    description += (
        f"; {torch.get_num_threads()} threads; transformers {transformers.__version__}, torch {torch.__version__}"
    )
    eos_token_ids = list(setup.bundle.manifest.tokenizer.eos_token_ids)
    return [_Transformers(name, model, draft_model, eos_token_ids, description) for name in names]


def _load(path: Path) -> Any:
    folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


def _precision(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


class _FirstToken(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
    """Records when the first token comes. The first `put` is the prompt."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.at = 0.0

    def put(self, _value: Any) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Do nothing."""


class _Transformers:
    runtime, num_parallel = "transformers", 1

    def __init__(
        self, name: ModeName, model: Any, draft_model: Any, eos_token_ids: list[int], description: str
    ) -> None:
        self.name, self.description = name.text, description
        self._model, self._eos_token_ids = model, eos_token_ids
        self._draft_model = draft_model if name.kind == "transformers-draft" else None
        self._draft_options = deepcopy(self._draft_model.generation_config) if self._draft_model else None
        if self._draft_options and name.num_assistant_tokens:
            self._draft_options.num_assistant_tokens = name.num_assistant_tokens
            self._draft_options.num_assistant_tokens_schedule = "constant"
            self._draft_options.assistant_confidence_threshold = 0.0

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        given = follow_options("transformers", self.runtime, self.name, config)
        options: dict[str, Any] = {
            "max_new_tokens": config.max_new_tokens,
            "do_sample": bool(config.temperature),
            "eos_token_id": [*config.stop_token_ids, *([] if config.ignore_eos else self._eos_token_ids)] or None,
            "pad_token_id": self._eos_token_ids[0],
        }
        if config.temperature:
            torch.manual_seed(config.seed or 0)
        for name, value in given.items():
            if config.temperature or name in _IF_GREEDY:
                options[name] = value if name == "top_k" else value or None  # its top_k is 50 if it is None
        if self._draft_model is not None:
            options["assistant_model"] = self._draft_model
            self._draft_model.generation_config = deepcopy(self._draft_options)  # a run changes it
        prompt = torch.tensor([prompt_token_ids])
        first = _FirstToken()
        began = time.perf_counter()
        with torch.inference_mode():
            answer = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=first, **options)
        total = time.perf_counter() - began
        return Run(answer[0, len(prompt_token_ids) :].tolist(), first.at - began, total)
