"""Damaged checkpoints: what the fuzzers found, one by one."""

import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters import write_adapter
from encoder_decoders import write_marian
from heads import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, VOCAB, write_head
from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider_export.bundles.drafters import is_model
from outrider_export.child import _one_line
from outrider_export.describe.plan import make_plan
from outrider_export.direct.convert import open_weights
from outrider_export.direct.pack import matrices_of
from outrider_export.heads.formats import read_head
from outrider_export.sources.peft_adapter import read_adapter
from outrider_export.sources.safetensors import count_weights, tensors_of
from outrider_export.sources.source import locate
from outrider_export.tokenizers.marian_tokenizer import tokenizer_of
from outrider_export.tokenizers.vocabulary import Vocabulary
from tiny import SHAPE, write_checkpoint

MAIN = Geometry("qwen2", 2, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, context_length=8192, logits_width=VOCAB)


def spoil(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint")
    spoil(tmp_path / "checkpoint" / "config.json", lambda config: config.update(model_type="qwen2"))
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "Expected `object`, got `array`"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it is nested too deeply"),
        (b'{"a": 1}', "Expected `object`, got `int`"),
        (b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}', "Expected `array`, got `str`"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "Expected `int` >= 0"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', r"a has 4 bytes for F32 \[2\]"),
        (b'{"a": {"dtype": "F4", "shape": [65], "data_offsets": [0, 8]}}', r"a has 8 bytes for F4 \[65\]"),
        (b'{"a": {"dtype": "F32", "shape": [%s1], "data_offsets": [0, 4]}}' % (b"1," * 16), "length <= 16"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "it has .* bytes of"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}', "it has .* bytes of"),
        # A thousand tensors of the same megabyte are a gigabyte.
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            "two tensors have the bytes from",
        ),
    ],
)
def test_headers_of_weights_are_checked(folder: Path, header: bytes, message: str) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    for read in (count_weights, tensors_of):
        with pytest.raises(ExportError, match=rf"model\.safetensors is missing or damaged: .*{message}.*Download"):
            read(folder)


Tensors = dict[str, Any]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("named", [
    lambda name: name.removeprefix("model."),
    lambda name: f"_orig_mod.{name}",
    lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
    lambda name: f"base_model.model.{name}",
    lambda name: f"module.module.{name}",
    lambda name: name.replace("mlp.", "_checkpoint_wrapped_module.mlp.").replace("l.", "l._fsdp_wrapped_module."),
    lambda name: f"model.language_model.{name}",
    lambda name: f"language_model.{name}",
])  # fmt: skip
def test_tensors_are_found_by_the_names_that_trainers_give(folder: Path, named: Callable[[str], str]) -> None:
    own = load_file(folder / "model.safetensors")
    own |= {HEAD: own[EMBEDDING][::-1].copy()}
    save_file({named(name): each for name, each in own.items()}, folder / "model.safetensors")
    weights = open_weights(folder, is_gguf=False)
    for name in (HEAD, EMBEDDING, "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        np.testing.assert_array_equal(weights.matrix(name.removesuffix(".weight")).read(slice(None)), own[name])


@pytest.mark.parametrize(("tied", "change", "has_own"), [
    (True, lambda own: {}, False),
    (True, lambda own: {HEAD: own[EMBEDDING].copy()}, False),
    (True, lambda own: {HEAD: own[EMBEDDING] * 2}, True),
    (True, lambda own: {HEAD: own[EMBEDDING][:-1].copy()}, True),
    (True, lambda own: {HEAD: own.pop(EMBEDDING)}, False),  # Transformers ties both ways
    (False, lambda own: {HEAD: own[EMBEDDING].copy()}, True),
    (None, lambda own: {HEAD: own[EMBEDDING] * 2}, True),  # Qwen2's own default: they are not tied
])  # fmt: skip
def test_the_output_matrix_of_the_files_counts(
    folder: Path, tied: bool | None, change: Callable[[Tensors], Tensors], has_own: bool
) -> None:
    """Source: `tie_weights` of Transformers 5.5."""
    spoil(folder / "config.json", lambda config: config.update(tie_word_embeddings=tied))
    own = load_file(folder / "model.safetensors")
    embedding = own[EMBEDDING]
    added = change(own)
    save_file(own | added, folder / "model.safetensors")
    weights = open_weights(folder, is_gguf=False)
    assert ("lm_head" in matrices_of(weights)) is has_own
    np.testing.assert_array_equal(weights.matrix("model.embed_tokens").read(slice(None)), embedding)
    if has_own:
        np.testing.assert_array_equal(weights.matrix("lm_head").read(slice(None)), added[HEAD])


@pytest.mark.parametrize(("tied", "renamed", "says"), [
    (False, lambda name: name, "has no lm_head.weight, and its config.json says that the output matrix is not the"),
    (True, lambda name: name.replace("q_proj.", "q_proj.base_layer."), r"base_layer\.\w+: a model with an adapter"),
    (True, lambda name: name.replace("model.norm", "model.modules_to_save.default"), "merge_and_unload"),
])  # fmt: skip
def test_weights_that_are_not_whole_are_refused(folder: Path, tied: bool, renamed: Any, says: str) -> None:
    spoil(folder / "config.json", lambda config: config.update(tie_word_embeddings=tied))
    own = load_file(folder / "model.safetensors")
    save_file({renamed(name): each for name, each in own.items()}, folder / "model.safetensors")
    with pytest.raises(ExportError, match=says):
        open_weights(folder, is_gguf=False)


@pytest.mark.parametrize("weight_map", [["a"], {"a": 1}, {"a": ["x"]}, 5])
def test_an_index_has_names_of_files(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(ExportError, match=r"index\.json is damaged: .*Expected"):
        count_weights(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\\b", "C:x", "..", ""])
def test_an_index_names_files_beside_it(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    with pytest.raises(ExportError, match=r"index\.json names .*, which is no file beside it"):
        count_weights(folder)


@pytest.mark.parametrize(("field", "value"), [
    ("num_attention_heads", [4]), ("num_attention_heads", "4"), ("num_hidden_layers", -2), ("num_hidden_layers", 2**40),
    ("head_dim", 2**40), ("hidden_act", ["silu"]), ("max_position_embeddings", float("inf")),
    ("num_key_value_heads", "two"), ("num_key_value_heads", float("inf")), ("max_position_embeddings", "long"),
    ("vocab_size", None), ("model_type", 5), ("text_config", 5),
])  # fmt: skip
def test_numbers_of_a_configuration_are_checked(folder: Path, field: str, value: Any) -> None:
    architecture = "SmolVLMForConditionalGeneration" if field == "text_config" else "Qwen2ForCausalLM"
    spoil(folder / "config.json", lambda config: config.update({"architectures": [architecture], field: value}))
    with pytest.raises(ExportError, match="a value in it is not what it has to be .*Download"):
        make_plan("main", locate(folder), "openvino", "int8")


def test_architectures_that_are_no_list_are_none(folder: Path) -> None:
    spoil(folder / "config.json", lambda config: config.update(architectures=5, layer_types=[["x"]]))
    assert not is_model(folder)
    with pytest.raises(ExportError):
        make_plan("main", locate(folder), "openvino", "int8")


def test_ids_of_tokens_take_no_room_for_those_between(folder: Path) -> None:
    spoil(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(far=30_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ExportError, match=r"its 40[0-9] tokens have ids from 0 to 30,?000,?000"):
            Vocabulary.of_folder(folder)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("token_id", [-1, float("inf"), "x", None])
def test_ids_of_tokens_are_checked(folder: Path, token_id: Any) -> None:
    spoil(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(far=token_id))
    with pytest.raises(ExportError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        Vocabulary.of_folder(folder)


def test_a_message_does_not_repeat_the_file(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(b"\xff" + path.read_bytes())
    with pytest.raises(ExportError, match="it is not in UTF-8") as refused:
        Vocabulary.of_folder(folder)
    assert len(str(refused.value)) < 500


def test_numbers_of_a_sentencepiece_model_end(tmp_path: Path) -> None:
    """A number as long as the file took minutes to be added up."""
    write_marian(tmp_path / "marian")
    (tmp_path / "marian" / "source.spm").write_bytes(b"\xff" * 3_000_000)
    with pytest.raises(ExportError, match="a number in it has more than ten bytes"):
        tokenizer_of(tmp_path / "marian")


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("mtp", {"head_dim": 2**40}, "has 4 heads of 1,099,511,627,776 numbers, and the drafter's weights have 64"),
    ("mtp", {"num_attention_heads": 0, "head_dim": 0}, "a value in it is not what it has to be"),
    ("eagle3", {"eagle_config": 5}, "a value in it is not what it has to be"),
    ("eagle3", {"transformer_layer_config": "x"}, "a value in it is not what it has to be"),
    ("dflash", {"dflash_config": [1]}, "a value in it is not what it has to be"),
    ("mtp", {"architectures": [["LlamaMTP"]]}, "is no drafter of a kind that is known"),
    ("mtp", {"architectures": 5}, "is no drafter of a kind that is known"),
])  # fmt: skip
def test_configurations_of_drafters_are_checked(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    folder = write_head(tmp_path / kind, kind, **changes)
    with pytest.raises(ExportError, match=message):
        read_head(folder, MAIN)


@pytest.mark.parametrize(("fields", "message"), [
    ({"rank_pattern": ["q_proj"]}, "a value in it is not what it has to be"),
    ({"rank_pattern": {"(": 4}}, "a value in it is not what it has to be"),
    ({"rank_pattern": {"(.*.*.*.*.*.*)*=": 4}}, r"no module's name with at most two \* and \+ and no groups"),
    ({"rank_pattern": {"[": 4}}, r"'\[' is no expression"),
    ({"rank_pattern": {f".*q{i}": 4 for i in range(101)}}, "it has more than 100 expressions"),
    ({"alpha_pattern": {"q_proj": "much"}}, "a value in it is not what it has to be"),
    ({"alpha_pattern": {"q_proj": float("nan")}},
     "has weights up to nan in lora_B of .*they have to be at most 65,504"),
    ({"alpha_pattern": {"q_proj": float("-inf")}}, "has weights up to inf in lora_B"),
    ({"lora_alpha": 1e300}, "has weights up to .*e.299 in lora_B of .*, scaled by 2.5e.299; .*Check lora_alpha"),
    ({"\x1b[2J\u2028\ud800": 1}, r"has \\x1b\[2J\\u2028\\ud800='1'"),
    ({"layers_to_transform": [[0]]}, "a value in it is not what it has to be"),
    ({"lora_alpha": float("inf")}, "lora_alpha=inf, which has to be a number above 0"),
])  # fmt: skip
def test_configurations_of_adapters_are_checked(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = write_adapter(tmp_path / "adapter", SHAPE, targets=["q_proj"], **fields)
    with pytest.raises(ExportError, match=message):
        read_adapter(folder)


@pytest.mark.parametrize("kind", [np.int32, np.bool_])
def test_weights_of_adapters_are_floats(tmp_path: Path, kind: Any) -> None:
    """Others could be added to a bundle, which could not be loaded then."""
    folder = write_adapter(tmp_path / "adapter", SHAPE, targets=["q_proj"])
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: each.astype(kind) for name, each in weights.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(ExportError, match="in lora_A of .*floats are wanted"):
        read_adapter(folder)


def test_the_base_of_an_adapter_is_a_name(tmp_path: Path) -> None:
    """The manifest that it was written into could not be read again."""
    folder = write_adapter(tmp_path / "adapter", SHAPE, targets=["q_proj"], base_model_name_or_path=5)
    assert read_adapter(folder).base is None


def test_weights_of_other_shapes_are_named_in_our_words() -> None:
    """Transformers', of models that only PyTorch converts."""
    said = _one_line(RuntimeError("You set `ignore_mismatched_sizes` to `False`, thus raising an error."))
    assert said.startswith("weights of the checkpoint have other shapes")


@pytest.mark.parametrize(("work", "limit"), [
    ("(made := bytes([1]) * (200 << 20)); time.sleep(60)", "50 MB of memory"), ("while True: pass", "0.2 seconds"),
], ids=["memory", "seconds"])  # fmt: skip
def test_a_child_beyond_a_limit_says_so_and_ends(work: str, limit: str) -> None:
    """As one that tries a tokenizer whose steps make gigabytes of a word, or never end."""
    script = (
        "import sys, time\nfrom outrider_export.child import _Relay, limited\n"
        "with limited(_Relay(sys.stdout), 'trying it', seconds=0.2, memory=50 << 20):\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + f"    {work}"],
        capture_output=True,
        check=False,
    )
    assert json.loads(done.stdout) == ["error", f"trying it takes more than {limit}, the limit."]
