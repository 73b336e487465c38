"""Tokenizers built from GGUF metadata, and their OpenVINO form, against the tokenizer they stand for."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino_genai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Sequence, Split

from outrider.errors import ExportError
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.sources.gguf_reader import read_header
from outrider_export.tokenizers.gguf_pretokenizers import PRE_TOKENIZERS
from outrider_export.tokenizers.gguf_tokenizer import write_tokenizer
from outrider_export.tokenizers.ir import write_tokenizer_ir
from outrider_export.tokenizers.job import PROBES, check_tokenizer_ir

PRES = ("qwen2", "smollm", "qwen35", "llama-bpe", "sentencepiece")
TEXTS = st.text() | st.text("a1 \n'é\u0301日<|im_end|>") | st.lists(st.sampled_from(PROBES)).map("".join)


@pytest.fixture(scope="module")
def rebuilt(
    make_checkpoint: Any, make_gguf: Any, build_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """For each pre-tokenizer: the original, the one rebuilt from a GGUF file, and its OpenVINO form."""
    made = {}
    for pre in PRES:
        checkpoint = make_checkpoint(f"tokenizer-{pre}", tokenizer=build_tokenizer(pre))
        folder = tmp_path_factory.mktemp(pre)
        write_tokenizer(read_header(make_gguf(f"tokenizer-{pre}", checkpoint, pre=pre)), folder)
        assert write_tokenizer_ir(folder)
        made[pre] = (
            Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            openvino_genai.Tokenizer(folder),
            folder,
        )
    return made


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("pre", PRES)
@settings(max_examples=200)
@given(text=TEXTS)
def test_rebuilt_tokenizer_is_the_original(rebuilt: dict[str, Any], pre: str, text: str) -> None:
    original, again, _, _ = rebuilt[pre]
    assert again.encode(text).ids == original.encode(text).ids
    ids = original.encode(text).ids
    assert again.decode(ids) == original.decode(ids)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("pre", PRES)
@settings(max_examples=200)
@given(text=TEXTS)
@example(text="a  1")  # "a", two spaces, "1" in smollm's: what one merged expression gets wrong
def test_openvino_tokenizer_is_the_original(rebuilt: dict[str, Any], pre: str, text: str) -> None:
    original, _, converted, _ = rebuilt[pre]
    ids = original.encode(text).ids
    found = converted.encode(text).input_ids.data[0].tolist() if text else []
    assert found == ids
    if ids:
        assert converted.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
        assert converted.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("pre", PRES)
def test_the_check_passes_and_can_fail(rebuilt: dict[str, Any], pre: str, tmp_path: Path) -> None:
    folder = rebuilt[pre][3]
    check_tokenizer_ir(folder)
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    other = PRES[PRES.index(pre) - 1]
    shutil.copyfile(rebuilt[other][3] / "tokenizer.json", mixed / "tokenizer.json")
    with pytest.raises(ExportError, match="OpenVINO's tokenizer turns"):
        check_tokenizer_ir(mixed)


def test_names_stand_for_the_rules_of_llamacpp() -> None:
    """By a name of each rule that is judged by a model's own tokenizer, or converted below."""
    same = {
        "llama-bpe": ("llama3", "falcon3", "pixtral", "lfm2"),
        "dbrx": ("smaug-bpe", "glm4", "glm5", "chatglm-bpe"),
        "deepseek-r1-qwen": ("megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        "gpt-4o": ("llama4", "kanana2", "minimax-m2"),
        "smollm": ("starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        "gpt-2": ("phi-2", "gigachat", "a.x-4.0", "exaone4", "jais", "granite-docling"),
        "olmo": ("mpt",),
        "deepseek-v3": ("hunyuan-dense", "joyai-llm"),
    }
    for name, others in same.items():
        assert all(PRE_TOKENIZERS[other] == PRE_TOKENIZERS[name] for other in others)
    for normal, plain in (("qwen2", "deepseek-r1-qwen"), ("command-r", "smollm"), ("olmo", "gpt-2")):
        assert PRE_TOKENIZERS[normal] == replace(PRE_TOKENIZERS[plain], normalizes=True)
    whole = {name for name, rule in PRE_TOKENIZERS.items() if rule.takes_whole_words}
    assert whole == {
        *same["llama-bpe"],
        "llama-bpe",
        "llama-v3",
        "falcon-h1",
        "midm-2.0",
        "jina-v5-nano",
        "tekken",
        "youtu",
        "minicpm5",
    }
    assert {name for name, rule in PRE_TOKENIZERS.items() if rule.begins} == whole - {"youtu", "minicpm5"}


_OTHERS = (
    "dbrx gpt-4o gpt-2 tekken deepseek-llm deepseek-v3 youtu deepseek-coder bailingmoe2 seed-coder exaone-moe minicpm5 "
    "tiny_aya kimi-k2"
)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("pre", _OTHERS.split())
def test_others_are_converted(pre: str, make_checkpoint: Any, make_gguf: Any, tmp_path: Path) -> None:
    """Their expressions, which are the publishers', mean the same in OpenVINO."""
    metadata = {"tokenizer.ggml.bos_token_id": 401}
    write_tokenizer(
        read_header(make_gguf(f"other-{pre}", make_checkpoint("plain"), pre=pre, metadata=metadata)), tmp_path
    )
    assert write_tokenizer_ir(tmp_path)
    check_tokenizer_ir(tmp_path)


_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s]*[\p{Ll}\p{Lm}\p{Lo}\p{M}%s]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_NAME = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s]+[\p{Ll}\p{Lm}\p{Lo}\p{M}%s]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Expressions that are written otherwise here than by the publishers.
PUBLISHED = {
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", f"{_WORD % ('', '')}|{_NAME % ('', '')}|{_REST % '/'}"),
    "kimi-k2": (
        r"[\p{Han}]+|" + (_WORD + "|" + _NAME).replace("%s", r"&&[^\p{Han}]") + "|" + _REST % "",
    ),
    "bailingmoe2": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
}  # fmt: skip


@pytest.mark.parametrize("pre", PUBLISHED)
@given(text=st.text() | st.text("aA1٣_ \n'slVE\u0301日語ａ.,/"))
def test_expressions_mean_what_the_published_ones_do(pre: str, text: str) -> None:
    steps = json.dumps({"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[pre].steps[:-1])})
    whole = Tokenizer(BPE())
    found = Tokenizer.from_str(json.dumps(json.loads(whole.to_str()) | {"pre_tokenizer": json.loads(steps)}))
    splits = [Split(Regex(pattern), "isolated") for pattern in PUBLISHED[pre]]
    assert found.pre_tokenizer is not None
    assert found.pre_tokenizer.pre_tokenize_str(text) == Sequence(splits).pre_tokenize_str(text)


def test_bos_token_is_added_where_the_file_says_so(make_checkpoint: Any, make_gguf: Any, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 401}
    write_tokenizer(read_header(make_gguf("bos", make_checkpoint("plain"), metadata=keys)), tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids[0] == 401
    assert write_tokenizer_ir(tmp_path)
    converted = openvino_genai.Tokenizer(tmp_path)
    assert converted.encode("a").input_ids.data[0].tolist()[0] == 401
    assert converted.encode("a", add_special_tokens=False).input_ids.data[0].tolist()[0] != 401


@pytest.mark.parametrize("name", ["Phi-3 mini", "Llama 2"])
def test_phi3_has_spaces_in_its_special_tokens(
    make_checkpoint: Any, make_gguf: Any, build_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    """Which its GGUF files cannot say."""
    checkpoint = make_checkpoint("tokenizer-sentencepiece", tokenizer=build_tokenizer("sentencepiece"))
    path = make_gguf(name, checkpoint, pre="sentencepiece", metadata={"general.name": name})
    write_tokenizer(read_header(path), tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    stripped = {token["content"] for token in tokens if token["rstrip"]}
    assert stripped == ({"<|im_start|>", "<|im_end|>", "<tool_call>"} if "Phi" in name else set())
    assert write_tokenizer_ir(tmp_path)
    original, converted = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), openvino_genai.Tokenizer(tmp_path)
    text = "<|im_start|>\n The quick<|im_end|>  brown\n<|im_start|>"
    assert converted.encode(text).input_ids.data[0].tolist() == original.encode(text).ids


def test_gemma_4_has_merges_and_sentencepiece_s_spelling(build_tokenizer: Any, tmp_path: Path) -> None:
    """Facts from llama.cpp's conversion/gemma.py, and GemmaTokenizer in Transformers 5.5."""
    content = json.loads(build_tokenizer("sentencepiece").to_str())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    del content["decoder"]["decoders"][-1]  # which strips a prefix
    content["model"]["merges"].reverse()  # scores would have them in the other order
    kinds = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]} | {"<unk>": 2}
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    metadata = {
        "general.architecture": "gemma4", "gemma4.context_length": 512, "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.token_type": [kinds.get(each, 6 if each.startswith("<0x") else 1) for each in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        # llama.cpp begins texts with BOS whatever such a file says
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.bos_token_id": vocabulary.index("<|im_start|>"),
    }  # fmt: skip
    write_tokenizer(GGUFHeader(tmp_path / "x.gguf", metadata, {}, {}), tmp_path)
    original, again = Tokenizer.from_str(json.dumps(content)), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert write_tokenizer_ir(tmp_path)
    converted = openvino_genai.Tokenizer(tmp_path)
    for text in (*PROBES, "  two  spaces\n\n\n and lines\n", "<|im_end|> <tool_call>"):
        ids = [vocabulary.index("<|im_start|>"), *original.encode(text).ids]
        assert again.encode(text).ids == ids
        assert again.decode(ids) == original.decode(ids)
        assert converted.encode(text).input_ids.data[0].tolist() == ids


@pytest.mark.parametrize(("key", "value", "message"), [
    ("tokenizer.ggml.pre", "teken", "pre-tokenizer 'teken', which is not known. Did you mean 'tekken'. Export the"),
    ("tokenizer.ggml.pre", None, "has the pre-tokenizer 'default': the file does not"),
    ("tokenizer.ggml.model", "bert", "has a 'bert' tokenizer"),
    ("tokenizer.ggml.model", "llama", "has no tokenizer.ggml.scores"),
    ("tokenizer.ggml.add_eos_token", True, "ends every text with the end token"),
    ("tokenizer.ggml.merges", None, "has no tokenizer.ggml.merges"),
    ("tokenizer.ggml.token_type", [1, 1], "404 tokens and 2 token types"),
])  # fmt: skip
def test_what_cannot_be_rebuilt_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    tokens = [f"t{i}" for i in range(404)]
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 404, "tokenizer.ggml.merges": [],
    }  # fmt: skip
    metadata[key] = value
    metadata = {k: v for k, v in metadata.items() if v is not None}
    with pytest.raises(ExportError, match=message):
        write_tokenizer(GGUFHeader(tmp_path / "x.gguf", metadata, {}, {}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_kinds_of_tokenizers_are_left_alone(rebuilt: dict[str, Any], tmp_path: Path) -> None:
    content = json.loads((rebuilt["qwen2"][3] / "tokenizer.json").read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert not write_tokenizer_ir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
