"""Converts a BPE `tokenizer.json` to OpenVINO's tokenizer and detokenizer, without torch or transformers.

Byte-level BPE (GPT-2's, Llama 3's, Qwen's), and BPE with SentencePiece's spelling of spaces and bytes (Llama 2's,
Mistral's, Phi 3's, Gemma's).

Both existing conversions (2026.4) have faults. openvino-genai's, for GGUF files, cuts a text to its last 8,192 tokens,
does not normalise, and leaves user-defined tokens such as <tool_call> out of decoded text. openvino_tokenizers', for
Hugging Face tokenizers, merges two splits into one, and so splits the spaces in "a  1", which SmolLM's tokenizer does
not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider_export.sources import read_json, read_templates


def write_tokenizer_ir(folder: Path) -> bool:
    """Write openvino_tokenizer and openvino_detokenizer (.xml, .bin) into `folder`.

    Returns False, and writes nothing, if `tokenizer.json` has parts that this module does not know.
    """
    import openvino
    from openvino_tokenizers import utils

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = read_json(folder / "tokenizer_config.json")
    if not _is_known(tokenizer):
        return False
    pipeline = _pipeline(tokenizer, config)
    whole, decoder = pipeline.get_tokenizer_ov_subgraph(), pipeline.get_detokenizer_ov_subgraph()
    # Language models do not use the third output, token types.
    outputs = [whole.output("input_ids"), whole.output("attention_mask")]
    encoder = openvino.Model(outputs, whole.get_parameters(), "tokenizer")
    encoder.add_sinks(whole.get_sinks())
    encoder = utils.change_outputs_type(encoder, openvino.Type.i64)
    decoder = utils.change_inputs_type(decoder, openvino.Type.i64)
    template = read_templates(folder).default  # openvino-genai's and the Model Server's; ours reads the folder's files
    for model, name in ((encoder, "openvino_tokenizer"), (decoder, "openvino_detokenizer")):
        utils.update_rt_info_with_environment(model)
        for kind in ("bos", "eos", "pad"):
            if (token_id := _token_id(tokenizer, config, kind)) is not None:
                model.set_rt_info(token_id, f"{kind}_token_id")
        if template:
            model.set_rt_info(template, "chat_template")
        openvino.save_model(model, folder / f"{name}.xml")
    return True


def _is_known(tokenizer: dict[str, Any]) -> bool:
    """Whether `_pipeline` can rebuild every part of `tokenizer.json`."""
    model, steps = tokenizer["model"], _steps(tokenizer, "pre_tokenizer")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return (
        model["type"] == "BPE"
        and not any(model.get(key) for key in _UNKNOWN_IN_BPE)
        and all(_normalizer(step) is not None for step in _steps(tokenizer, "normalizer"))
        and all(_splits(step, tokenizer) is not None for step in steps)
        and (is_byte_level or bool(model.get("byte_fallback")))
        and all(_decoder(step) is not None for step in _steps(tokenizer, "decoder"))
        and is_byte_level == (_steps(tokenizer, "decoder") == [tokenizer["decoder"]])
        and {step["type"] for step in _steps(tokenizer, "post_processor")} <= {"ByteLevel", "TemplateProcessing"}
        and not any(token[key] for token in tokenizer["added_tokens"] for key in _UNKNOWN_IN_ADDED)
    )


# OpenVINO's BPE takes a whole word from the vocabulary before it tries the merges, as `ignore_merges` says. Where it
# does not say so, that is the same: merges lead to every word of a vocabulary that was trained with them.
_UNKNOWN_IN_BPE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_UNKNOWN_IN_ADDED = ("single_word", "normalized")
_LONGEST = 2**30  # tokens of a text; OpenVINO adds special tokens to it, and the sum has to fit 32 bits
_SPACE = "\u2581"  # SentencePiece's spelling of a space
_UNICODE = ("NFC", "NFD", "NFKC", "NFKD")


# The parts of tokenizer.json that may be a sequence of steps, and the key of these.
_KEYS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


def _steps(tokenizer: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The steps of a part; none where it is left out."""
    step = tokenizer[part]
    if step is None:
        return []
    return list(step[_KEYS[part]]) if step["type"] == "Sequence" else [step]


def _pipeline(tokenizer: dict[str, Any], config: dict[str, Any]) -> Any:
    from openvino_tokenizers import tokenizer_pipeline as steps
    from openvino_tokenizers.constants import UTF8ReplaceMode

    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    pipeline = steps.TokenizerPipeline()
    pipeline.number_of_inputs = 1
    tokens = [steps.SpecialToken(each["content"], each["lstrip"], each["rstrip"]) for each in tokenizer["added_tokens"]]
    pipeline.add_steps(steps.SpecialTokensSplit(tokens))
    for step in _steps(tokenizer, "normalizer"):
        pipeline.add_steps(_normalizer(step))
    for step in _steps(tokenizer, "pre_tokenizer"):
        pipeline.add_steps(_splits(step, tokenizer))
    pipeline.add_steps(steps.BPETokenizationStep.from_hf_json(tokenizer))
    pipeline.vocab = pipeline[-1].vocab
    longest = min(int(config.get("model_max_length") or _LONGEST), _LONGEST)
    pipeline.add_steps(steps.TruncationStep(max_length=longest, truncate_right=False))  # off by default
    templates = [step for step in _steps(tokenizer, "post_processor") if step["type"] == "TemplateProcessing"]
    pipeline.add_steps(
        steps.CombineSegmentsStep.from_hf_json_template_postprocessor(templates[0], 1, True)
        if templates
        else steps.CombineSegmentsStep([steps.Sequence()])
    )
    pipeline.add_steps(steps.PaddingStep(_token_id=_token_id(tokenizer, config, "pad"), pad_right=False))
    decoder = steps.VocabDecoderStep.from_hf_json(
        tokenizer_json=tokenizer,
        pipeline_vocab=pipeline.vocab,
        skip_tokens=special,
        added_tokens=added,
        do_skip_tokens=True,
        is_byte_level=pipeline.is_byte_level,
    )
    pipeline.add_steps([decoder, *(_decoder(step) for step in _steps(tokenizer, "decoder"))])
    pipeline.add_steps(steps.UTF8ValidateStep(mode=UTF8ReplaceMode.REPLACE))
    return pipeline


def _normalizer(step: dict[str, Any]) -> Any:
    """One normaliser's step, or None if it is not known."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    if step["type"] in _UNICODE:
        return steps.NormalizeUnicode(step["type"])
    if step["type"] == "Prepend":
        return steps.RegexNormalizationStep.prepend_regex(step["prepend"])
    if step["type"] == "Replace" and step["pattern"] == {"String": " "}:
        return steps.RegexNormalizationStep.replace_spaces_metaspace(step["content"])
    return None


def _decoder(step: dict[str, Any]) -> Any:
    """One decoder's step, or None if it is not known."""
    from openvino_tokenizers import tokenizer_pipeline as steps

    if step["type"] == "ByteLevel":
        return steps.CharsToBytesStep()
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return steps.RegexDecodingStep.parse_replace_dict(step)
    if step["type"] == "Strip" and (step["start"], step["stop"]) == (1, 0):
        return steps.RegexDecodingStep.parse_strip_dict(step)
    made = {"Fuse": steps.FuseStep, "ByteFallback": steps.ByteFallbackStep}.get(step["type"])
    return made and made()


def _splits(step: dict[str, Any], tokenizer: dict[str, Any]) -> list[Any] | None:
    """One pre-tokenizer's steps, or None if it is not known.

    They must not be merged into one expression: each splits the pieces of the one before.
    """
    from openvino_tokenizers import tokenizer_pipeline as steps

    def isolate(pattern: str) -> Any:
        return steps.RegexSplitStep(pattern, behaviour="isolate", mergeable=False)

    if step["type"] == "Digits" and step["individual_digits"]:
        return [isolate(r"\p{N}")]
    if step["type"] == "Split" and "Regex" in step["pattern"] and step["behavior"] == "Isolated" and not step["invert"]:
        return [isolate(step["pattern"]["Regex"])]
    if step["type"] == "Split" and step["pattern"] == {"String": " "}:
        # Where spaces have been replaced, there are none to split at (Gemma).
        replaced = [each.get("pattern") for each in _steps(tokenizer, "normalizer")]
        return [] if {"String": " "} in replaced else None
    if step["type"] == "Metaspace" and step["replacement"] == _SPACE and not step.get("split", True):
        made = [steps.RegexNormalizationStep.replace_spaces_metaspace(_SPACE)]
        if step["prepend_scheme"] == "always":
            made.append(steps.RegexNormalizationStep.prepend_with_check_regex(_SPACE, _SPACE))
        return made if step["prepend_scheme"] in ("always", "never") else None
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        pattern = steps.RegexSplitStep.byte_level_splitter().split_pattern
        return [*([isolate(pattern)] if step.get("use_regex", True) else []), steps.BytesToCharsStep()]
    return None


def _token_id(tokenizer: dict[str, Any], config: dict[str, Any], kind: str) -> int | None:
    token = config.get(f"{kind}_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = {entry["content"]: int(entry["id"]) for entry in tokenizer["added_tokens"]}
    return added.get(content, tokenizer["model"]["vocab"].get(content)) if content else None
