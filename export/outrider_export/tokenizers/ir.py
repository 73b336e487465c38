"""Converts a `tokenizer.json` to OpenVINO's tokenizer and detokenizer, without torch or transformers.

Byte-level BPE (GPT-2's, Llama 3's, Qwen's), BPE with SentencePiece's spelling of spaces and bytes (Llama 2's,
Mistral's, Phi 3's, Gemma's), and Unigram (T5's, MarianMT's).

Both existing conversions (2026.4) have faults. openvino-genai's, for GGUF files, cuts a text to its last 8,192 tokens,
does not normalise, and leaves user-defined tokens such as <tool_call> out of decoded text. openvino_tokenizers', for
Hugging Face tokenizers, merges two splits into one, and so splits the spaces in "a  1", which SmolLM's tokenizer does
not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.inputs.text.special_tokens import text_of
from outrider.inputs.text.token_bytes import BYTE_PIECE, SPACE
from outrider_export.sources.source import read_json, read_templates
from outrider_export.tokenizers.files import read_tokenizer
from outrider_export.tokenizers.steps import decoders, normalizer, prepends_first, splits, steps_of, texts_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def write_tokenizer_ir(folder: Path, original: Tokenizer | None = None) -> bool:
    """Write openvino_tokenizer and openvino_detokenizer (.xml, .bin) into `folder`.

    original: its tokenizer, if it was read already. Returns False, and writes nothing, if `tokenizer.json` has parts
    that this module does not know.

    Raises:
        ExportError: as `read_tokenizer`.
    """
    import openvino
    from openvino_tokenizers import utils

    tokenizer = json.loads((original or read_tokenizer(folder)).to_str())  # in today's spelling
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
    model, normalizers = tokenizer["model"], steps_of(tokenizer, "normalizer")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps_of(tokenizer, "pre_tokenizer"))
    if model["type"] == "Unigram":
        is_whole = _is_metaspace(tokenizer["pre_tokenizer"]) and _is_metaspace(tokenizer["decoder"])
    else:
        is_whole = (
            model["type"] == "BPE"
            and not any(model[key] for key in _UNKNOWN_IN_BPE)
            and (is_byte_level or bool(model["byte_fallback"]))
            and is_byte_level == ((tokenizer["decoder"] or {}).get("type") == "ByteLevel")
        )
    return (
        is_whole
        and all(normalizer(step) is not None for step in normalizers)
        and splits(tokenizer) is not None
        and decoders(tokenizer) is not None
        and {step["type"] for step in steps_of(tokenizer, "post_processor")} <= {"ByteLevel", "TemplateProcessing"}
        and not any(token["single_word"] for token in tokenizer["added_tokens"])
        # They are looked for before a text is normalised, which leaves them as they are.
        and (
            {step["type"] for step in normalizers} <= {"NFC"}
            or not any(token["normalized"] for token in tokenizer["added_tokens"])
        )
    )


_UNKNOWN_IN_BPE = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_LONGEST = 2**30  # tokens of a text; OpenVINO adds special tokens to it, and the sum has to fit 32 bits


def _is_metaspace(part: dict[str, Any] | None) -> bool:
    """Whether spaces are spelled as SentencePiece's, one before each word."""
    last = (part or {}).get("pretokenizers", [part])[-1] or {}
    return (last.get("type"), last.get("replacement"), last.get("prepend_scheme")) == ("Metaspace", SPACE, "always")


def _pipeline(tokenizer: dict[str, Any], config: dict[str, Any]) -> Any:
    from openvino_tokenizers import tokenizer_pipeline as steps
    from openvino_tokenizers.constants import UTF8ReplaceMode
    from openvino_tokenizers.utils import quote_meta

    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    pipeline = steps.TokenizerPipeline()
    pipeline.number_of_inputs = 1
    tokens = [steps.SpecialToken(each["content"], each["lstrip"], each["rstrip"]) for each in tokenizer["added_tokens"]]
    if prepends_first(tokenizer):
        pipeline.add_steps(steps.RegexNormalizationStep("", SPACE, global_replace=False))
    pipeline.add_steps(steps.SpecialTokensSplit(tokens))
    for step in steps_of(tokenizer, "normalizer"):
        pipeline.add_steps(normalizer(step))
    pipeline.add_steps(splits(tokenizer))
    is_unigram = tokenizer["model"]["type"] == "Unigram"
    model = steps.UnigramModelStep if is_unigram else steps.BPETokenizationStep
    pipeline.add_steps(model.from_hf_json(tokenizer))
    vocabulary = pipeline.vocab = list(pipeline[-1].vocab)
    if not is_unigram:
        _hide_unreached(pipeline[-1], tokenizer["model"])
    longest = min(int(config.get("model_max_length") or _LONGEST), _LONGEST)
    pipeline.add_steps(steps.TruncationStep(max_length=longest, truncate_right=False))  # off by default
    templates = [step for step in steps_of(tokenizer, "post_processor") if step["type"] == "TemplateProcessing"]
    pipeline.add_steps(
        steps.CombineSegmentsStep.from_hf_json_template_postprocessor(templates[0], 1, True)
        if templates
        else steps.CombineSegmentsStep([steps.Sequence()])
    )
    pipeline.add_steps(steps.PaddingStep(_token_id=_token_id(tokenizer, config, "pad"), pad_right=False))
    from_ids = steps.VocabDecoderStep.from_hf_json(
        tokenizer_json=tokenizer,
        pipeline_vocab=pipeline.vocab,
        skip_tokens=special,
        added_tokens=added,
        do_skip_tokens=True,
        is_byte_level=pipeline.is_byte_level,
    )
    if not pipeline.is_byte_level:
        from_ids.vocab = texts_of(tokenizer, from_ids.add_special_tokens_to_vocab(vocabulary, added))
    pipeline.add_steps([from_ids, *(decoders(tokenizer) or []), steps.UTF8ValidateStep(mode=UTF8ReplaceMode.REPLACE)])
    pipeline.finalize()
    if prepends_first(tokenizer):  # `finalize` has set another pattern, which takes no account of tokens that strip
        others = "|".join([f"[ {SPACE}]", *(quote_meta(token.text) for token in tokens)])
        pipeline.steps[0].regex_search_pattern = rf"\A(?!{others})(?=[\s\S])"
    return pipeline


def _hide_unreached(step: Any, model: dict[str, Any]) -> None:
    """Rename the pieces of a BPE step that no merges lead to.

    OpenVINO takes a whole word from the vocabulary before it tries the merges, and a text never has such a piece.
    """
    if model["ignore_merges"]:
        return
    reached = {piece for piece in model["vocab"] if len(piece) == 1 or BYTE_PIECE.fullmatch(piece)}
    count = 0
    while len(reached) > count:  # a second time, where merges are not in the order of their parts
        count = len(reached)
        reached.update(left + right for left, right in model["merges"] if left in reached and right in reached)
    hidden = [token_id for piece, token_id in model["vocab"].items() if piece not in reached]
    for token_id in hidden:
        step.vocab[token_id] = f" \N{REPLACEMENT CHARACTER}{token_id}"  # no piece has a space
    step.merges = [pair for pair in step.merges if pair[0] in reached and pair[1] in reached]


def _token_id(tokenizer: dict[str, Any], config: dict[str, Any], kind: str) -> int | None:
    if not (content := text_of(config.get(f"{kind}_token"))):
        return None
    added = {entry["content"]: int(entry["id"]) for entry in tokenizer["added_tokens"]}
    pieces = tokenizer["model"]["vocab"]
    found = pieces if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}
    return added.get(content, found.get(content))
