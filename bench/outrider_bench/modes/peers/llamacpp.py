"""llama.cpp, through llama-cpp-python, on a GGUF file.

Plain decoding, and its Python prompt lookup (`LlamaPromptLookupDecoding`). It gets the bundle's token ids, so the file
must have the bundle's vocabulary.
"""

from __future__ import annotations

import time

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from outrider.config import GenerationConfig
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.check import check_vocabulary, follow_options
from outrider_bench.modes.setup import Setup

DEFAULT_LENGTH = 10  # LlamaPromptLookupDecoding's
CONTEXT = 4096  # tokens of prompt and answer


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names, on one model."""
    path = setup.peer_models["llamacpp"]
    threads = setup.config.device.num_threads or None
    lookup = LlamaPromptLookupDecoding() if names[0].kind == "llamacpp-ngram" else None  # keeps all rows' logits
    model = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, draft_model=lookup, verbose=False
    )
    check_vocabulary(path, model.n_vocab(), setup, "a file")
    weights = model.metadata.get("general.name", "") or path.name
    description = (
        f"{path.name} ({weights}), its own weights and kernels, cache f16; {threads or 'the default number of'} "
        f"threads; llama-cpp-python {llama_cpp.__version__}"
    )
    end_token_ids = {*setup.bundle.manifest.tokenizer.eos_token_ids, model.token_eos()}
    return [_LlamaCpp(name, model, end_token_ids, description) for name in names]


class _LlamaCpp:
    runtime, num_parallel = "llama.cpp", 1

    def __init__(self, name: ModeName, model: llama_cpp.Llama, end_token_ids: set[int], description: str) -> None:
        self.name, self.description = name.text, description
        self._mode, self._model, self._end_token_ids = name, model, end_token_ids

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        given = follow_options("llamacpp", self.runtime, self.name, config)
        model = self._model
        if self._mode.kind == "llamacpp-ngram":
            length = self._mode.num_assistant_tokens or DEFAULT_LENGTH
            model.draft_model = LlamaPromptLookupDecoding(config.max_ngram_size, length)
        if config.temperature:
            model.set_seed(config.seed or 0)
        end = set(config.stop_token_ids) | (set() if config.ignore_eos else self._end_token_ids)
        limit = min(config.max_new_tokens or CONTEXT, CONTEXT - len(prompt_token_ids))
        model.reset()  # every run reads its whole prompt
        token_ids: list[int] = []
        began = time.perf_counter()
        first = began
        for token_id in model.generate(prompt_token_ids, temp=given.pop("temperature"), **given):
            first = first if token_ids else time.perf_counter()
            token_ids.append(int(token_id))
            if token_id in end or len(token_ids) >= limit:
                break
        return Run(token_ids, first - began, time.perf_counter() - began)
