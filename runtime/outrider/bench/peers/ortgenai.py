"""onnxruntime-genai on a folder of its own, as its model builder writes it.

It is given the bundle's token ids, so the folder must have the bundle's vocabulary.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime_genai as og

from outrider.bench.modes import ModeName, Run, Setup
from outrider.bench.peers import check_options, check_vocabulary

if TYPE_CHECKING:
    from outrider.bench.modes import Mode
    from outrider.config import GenerationConfig

_FOLLOWED = ("temperature", "top_k", "top_p")


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names, on one model."""
    path, threads = setup.peer_models["ortgenai"], setup.config.device.num_threads
    own = json.loads((path / "genai_config.json").read_text(encoding="utf-8"))["model"]
    check_vocabulary(path, own["vocab_size"], setup, "a folder")
    config = og.Config(str(path))
    if threads:
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = og.Model(config)
    description = (
        f"{path.name}, its own weights and kernels; {threads or 'the default number of'} threads; "
        f"onnxruntime-genai {og.__version__}"
    )
    eos_token_ids = set(setup.bundle.manifest.tokenizer.eos_token_ids)
    return [_OrtGenai(name, model, eos_token_ids, own["context_length"], description) for name in names]


class _OrtGenai:
    runtime, num_parallel = "onnxruntime-genai", 1

    def __init__(
        self, name: ModeName, model: Any, eos_token_ids: set[int], context_length: int, description: str
    ) -> None:
        self.name, self.description = name.text, description
        self._model, self._eos_token_ids, self._context_length = model, eos_token_ids, context_length

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""
        check_options(self.runtime, self.name, config, _FOLLOWED)
        longest = len(prompt_token_ids) + config.max_new_tokens if config.max_new_tokens else self._context_length
        options: dict[str, Any] = {"max_length": min(longest, self._context_length), "do_sample": False}
        if config.temperature:
            options |= {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p}
            options |= {"top_k": config.top_k, "random_seed": config.seed or 0}
        if config.ignore_eos:
            options["min_length"] = options["max_length"]  # it never says the end, where others go on behind it
        end = set(config.stop_token_ids) | (set() if config.ignore_eos else self._eos_token_ids)
        token_ids: list[int] = []
        began = time.perf_counter()
        params = og.GeneratorParams(self._model)
        params.set_search_options(**options)
        generator = og.Generator(self._model, params)
        generator.append_tokens(np.array(prompt_token_ids, dtype=np.int32))
        first = began
        while not generator.is_done():
            generator.generate_next_token()
            first = first if token_ids else time.perf_counter()
            token_ids.append(int(generator.get_next_tokens()[0]))
            if token_ids[-1] in end:
                break
        return Run(token_ids, first - began, time.perf_counter() - began)
