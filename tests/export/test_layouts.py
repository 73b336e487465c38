"""Files as they were published, from 2019 to 2026: each is exported without PyTorch, or refused by name."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino_genai
import pytest
from tokenizers import Tokenizer as Original

import newcomers
from exports import logits_of_ir
from layout_mixtures import judge
from layout_tokenizers import FAMILIES, sentencepiece, text_of
from layouts import DIRECT, LAYOUTS, config_of, write, write_configs
from outrider.errors import ExportError
from outrider.inputs.text.tokenizer import Tokenizer
from outrider_export import export_bundle
from outrider_export.describe.encoder_decoder import geometry_of, kind_of_encoder_decoder
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.describe.plan import check_route, fetch_config, why_not_direct
from outrider_export.describe.special_tokens import eos_of_folder
from outrider_export.sources.safetensors import count_weights
from outrider_export.sources.source import locate, read_config, read_json
from outrider_export.tokenizers.files import copy_files
from outrider_export.tokenizers.ir import write_tokenizer_ir
from outrider_export.tokenizers.job import PROBES, add_tokenizer, check_tokenizer_ir
from outrider_export.tokenizers.vocabulary import Vocabulary
from shapes import cosines, do_not_scale_windows, logits_of, mend_deepseek_v2, register

LETTERS = "ab1 \n'é\u0301日\t\r.,!?…،|[(]^_\u2581-–\u00a0\u3000\u200d🙂AZ९Ⅷ½²ﬁİ<>"
PROMPT = np.random.default_rng(3).integers(0, 300, size=40).tolist() * 2


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`converted("gpt2")`: the folder of a family's tokenizer, with OpenVINO's form of it."""

    @functools.cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        (folder / "tokenizer.json").write_text(text_of(family), encoding="utf-8")
        assert write_tokenizer_ir(folder)
        check_tokenizer_ir(folder)
        return folder

    return make


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_export.extras.missing", lambda _: ["torch"])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_texts_are_the_original_s(family: str, converted: Any) -> None:
    original, made = Original.from_str(text_of(family)), openvino_genai.Tokenizer(converted(family))
    parts = [*(token.content for token in original.get_added_tokens_decoder().values()), *(p[:20] for p in PROBES)]
    rng = np.random.default_rng(0)
    for _ in range(40):
        drawn = [*LETTERS, *rng.choice(parts, size=12)]
        text = "".join(rng.choice(drawn, size=rng.integers(1, 14)))
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert made.encode(text, add_special_tokens=special).input_ids.data[0].tolist() == ids, text
            if ids:
                expected = original.decode(ids, skip_special_tokens=special)
                assert made.decode(ids, skip_special_tokens=special) == expected, ids


@pytest.mark.fast_cases(15)
@pytest.mark.parametrize("name", LAYOUTS)
def test_files_are_read(name: str, converted: Any, no_torch: None, tmp_path: Path) -> None:
    """Without a weight: the route, the tokens that end answers, the bundle's tokenizer and its chat template."""
    layout, folder = LAYOUTS[name], write_configs(LAYOUTS[name], tmp_path / name)
    if layout.refused:
        with pytest.raises(ExportError, match=layout.refused):
            check_route("main", locate(folder), "openvino", None)
    else:
        check_route("main", locate(folder), "openvino", None)
        assert why_not_direct(name, None, read_config(folder), trust_remote_code=False) is None
    if "cannot be exported" not in layout.refused:
        config = read_config(folder)
        geometry = (geometry_of if kind_of_encoder_decoder(config) else geometry_of_config)(config, folder)
        assert (geometry.num_heads, geometry.hidden_size) == (4, 64)
    if layout.files != "json":
        with pytest.raises(ExportError, match="has no tokenizer.json. Save one with transformers"):
            Vocabulary.of_folder(folder)
        return
    vocabulary, bundled = Vocabulary.of_folder(folder), tmp_path / "bundled"
    found = eos_of_folder(folder, read_json(folder / "config.json"), vocabulary)
    listed = config_of(layout).get("eos_token_id", [])
    assert {*found} >= {*(listed if isinstance(listed, list) else [listed])}
    copy_files(folder, bundled)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        given = read_json(bundled / file)
        assert not any(isinstance(value, dict) for key, value in given.items() if key.endswith("_token"))
    for path in converted(layout.family).glob("openvino_*"):
        shutil.copyfile(path, bundled / path.name)
    tokenizer = Tokenizer(bundled)
    original = Original.from_str(text_of(layout.family))
    assert tokenizer.encode_prompt("Hello, wörld 12", chat_template=False) == original.encode("Hello, wörld 12").ids
    if layout.template:
        expected = f"{layout.bos}[user] Hi\n[assistant]"
        assert tokenizer.render([{"role": "user", "content": "Hi"}]) == expected


def test_a_tokenizer_that_is_not_known_is_refused(no_torch: None, tmp_path: Path) -> None:
    """It is converted beside the weights, and nothing is left of them."""
    folder = write(LAYOUTS["tinyllama-1.1b-chat"], tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "UnicodeScripts"}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ExportError, match=r"The tokenizer of model cannot be converted: This kind of tokenizer needs"):
        export_bundle(folder, output=tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_only_texts_have_to_agree_where_a_model_only_writes(tmp_path: Path) -> None:
    """Whisper's merges may lead to pieces that its vocabulary lacks, which the original's library does not read."""
    content = json.loads(text_of("whisper"))
    content["model"]["merges"].append("Ġ Ā")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ExportError, match="is no tokenizer that tokenizers .* reads: .*out of vocabulary"):
        write_tokenizer_ir(tmp_path)
    add_tokenizer({"tokenizer": str(tmp_path), "decodes_only": True})
    original, made = Original.from_str(text_of("whisper")), openvino_genai.Tokenizer(tmp_path)
    ids = original.encode("The quick brown Füchse 日本 <|0.02|>").ids
    assert made.decode(ids) == original.decode(ids)


def test_pieces_as_long_as_a_byte_s_are_no_bytes(tmp_path: Path) -> None:
    content = sentencepiece("split", plain=["<code>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert write_tokenizer_ir(tmp_path)
    made = openvino_genai.Tokenizer(tmp_path)
    ids = made.encode("a <code>\x01", add_special_tokens=False).input_ids.data[0].tolist()
    assert made.decode(ids) == "a <code>\x01"


@pytest.mark.slow
@pytest.mark.parametrize("name", DIRECT)
def test_logits_are_those_of_transformers(name: str, no_torch: None, tmp_path: Path) -> None:
    """The exported model's logits are those of Transformers, which read the same files.

    Engines answer with a model of each architecture in `test_architectures`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = write(LAYOUTS[name], tmp_path / name)
    assert count_weights(fetch_config(locate(folder)).fetched) > 0
    bundle = export_bundle(folder, output=tmp_path / "bundle", weights="fp32")
    register()
    changes = {key: value for key, value in LAYOUTS[name].changes.items() if key != "model_type"}
    changes |= LAYOUTS[name].mended
    folder = write(replace(LAYOUTS[name], whole="", changes=changes), tmp_path / "text")
    if name == "nemotron-nano-9b-v2":
        model = judge("nemotron_h", folder, len(name))
    else:
        names = newcomers.key_mapping(LAYOUTS[name].config)
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, key_mapping=names or None
        )
        assert not told["missing_keys"]
    if model.config.model_type == "olmo3":
        do_not_scale_windows(model)
    if model.config.model_type == "deepseek_v2":
        mend_deepseek_v2(model)
    found = logits_of_ir(bundle.model_path(bundle.manifest.main), PROMPT, (40, 40))
    assert cosines(found, logits_of(model.eval(), PROMPT)[:, : found.shape[1]]).min() > 0.9999
