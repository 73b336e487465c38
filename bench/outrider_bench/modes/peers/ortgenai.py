"""onnxruntime-genai on the bundle's own ONNX files, or on folders of its own, as its model builder writes them.

Its plain decoding, prompt lookup (`speculative.ngram_size`), and speculative decoding with a draft model
(`model.draft`), as in its docs/SpeculativeDecoding.md. It gets the bundle's token ids, so a folder of its own must have
the bundle's vocabulary. It needs no tokenizer.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime_genai as og

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import ModelEntry
from outrider.config import GenerationConfig
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.check import check_vocabulary, follow_options
from outrider_bench.modes.peers.known import ORT_DRAFT, ORT_MAIN
from outrider_bench.modes.peers.link import link
from outrider_bench.modes.setup import Setup

CONFIG = "genai_config.json"
_DRAFT = "draft-model"  # the draft model's folder, which has to be below the main model's
_FEWEST = 2  # draft tokens at first, if it chooses their number


def load(names: list[ModeName], setup: Setup) -> list[Mode]:
    """The modes of these names, on one model."""
    bundle, threads = setup.bundle, setup.config.device.num_threads
    drafts = names[0].kind == "ortgenai-draft"
    options: dict[str, Any] = {"intra_op_num_threads": threads} if threads else {}
    if drafts:  # each model has its own threads: one that spins while it waits takes a core from the other
        options["session.intra_op.allow_spinning"] = "0"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        config, says = _lay_out(folder, "main", bundle, bundle.manifest.main, setup)
        config["model"]["decoder"].setdefault("session_options", {}).update(options)
        # A folder of its own may enable drafts; here the mode decides.
        config["model"].pop("draft", None)
        config.pop("speculative", None)
        if drafts:
            own, says_draft = _lay_out(folder / _DRAFT, "draft", setup.draft_bundle, setup.draft_models[0].model, setup)
            draft = own["model"]["decoder"]
            draft["filename"] = f"{_DRAFT}/{draft['filename']}"
            draft.setdefault("session_options", {}).update(options)
            config["model"]["draft"] = draft
            says += f", {says_draft}"
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        model = og.Model(og.Config(name))
    description = (
        f"{says}; {threads or 'the default number of'} threads{' a model, not spinning' if drafts else ''}; "
        f"onnxruntime-genai {og.__version__}, onnxruntime {onnxruntime.__version__}"
    )
    eos_token_ids = set(bundle.manifest.tokenizer.eos_token_ids)
    return [_OrtGenai(name, model, eos_token_ids, config["model"]["context_length"], description) for name in names]


def _lay_out(folder: Path, role: str, bundle: Bundle, entry: ModelEntry, setup: Setup) -> tuple[dict[str, Any], str]:
    """Link the files of a bundle's model, or of the one that --peer-model gives instead, into `folder`.

    Returns its configuration and a short description.

    Raises:
        OptionError: when the given model does not have the bundle's vocabulary.
    """
    given = setup.peer_models.get(ORT_MAIN if role == "main" else ORT_DRAFT)
    path = given or bundle.folder / entry.folder
    folder.mkdir(exist_ok=True)
    for file in path.iterdir():
        if file.is_file() and file.name != CONFIG:
            link(file, folder / file.name)
    if given is None:
        return _describe(bundle, entry), f"{role} model {entry.weights}, the same files, CPU"
    config: dict[str, Any] = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    check_vocabulary(path, config["model"]["vocab_size"], setup, "a folder")
    return config, f"{role} model {path.name}, its own weights"


def _describe(bundle: Bundle, entry: ModelEntry) -> dict[str, Any]:
    """The content of genai_config.json for a bundle's model, whose inputs have the builder's names."""
    tokenizer, geometry = bundle.manifest.tokenizer, entry.geometry
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    decoder = {
        "filename": bundle.model_path(entry).name,
        "head_size": geometry.head_size,
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "num_hidden_layers": geometry.num_layers,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "decoder",
        "vocab_size": geometry.logits_width,
        "context_length": geometry.context_length,
        "eos_token_id": list(tokenizer.eos_token_ids),
        **{name: token_id for name, token_id in special.items() if token_id is not None},
        "decoder": decoder,
    }
    return {"model": model, "search": {"past_present_share_buffer": True}}


class _OrtGenai:
    runtime, num_parallel = "onnxruntime-genai", 1

    def __init__(
        self, name: ModeName, model: Any, eos_token_ids: set[int], context_length: int, description: str
    ) -> None:
        self.name, self.description = name.text, description
        self._mode, self._model = name, model
        self._eos_token_ids, self._context_length = eos_token_ids, context_length

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        given = follow_options("ortgenai", self.runtime, self.name, config)
        longest = len(prompt_token_ids) + config.max_new_tokens if config.max_new_tokens else self._context_length
        options: dict[str, Any] = {"max_length": min(longest, self._context_length), "do_sample": False}
        if config.temperature:
            options |= {"do_sample": True, "random_seed": config.seed or 0, **given}
        if config.ignore_eos:
            options["min_length"] = options["max_length"]  # no end token is chosen; other runtimes continue past it
        end = set(config.stop_token_ids) | (set() if config.ignore_eos else self._eos_token_ids)
        token_ids: list[int] = []
        began = time.perf_counter()
        params = og.GeneratorParams(self._model)
        params.set_search_options(**options)
        if drafting := self._drafting(config):
            params.set_speculative_options(**drafting)
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

    def _drafting(self, config: GenerationConfig) -> dict[str, int]:
        """Its speculative options; without a number it adapts the number of draft tokens."""
        if self._mode.kind == "ortgenai":
            return {}
        number = self._mode.num_assistant_tokens
        drafting = {"min_adaptive_k": _FEWEST} if number is None else {"max_draft_tokens": number}
        if self._mode.kind == "ortgenai-ngram":
            drafting["ngram_size"] = max(config.max_ngram_size, 2)  # it matches one token fewer than this
        return drafting
