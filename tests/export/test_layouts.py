"""Files as they were published, from 2019 to 2026: each is exported without PyTorch, or refused by name."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino_genai
import pytest
from tokenizers import Tokenizer as Original

from layout_tokenizers import FAMILIES, sentencepiece, text_of
from layouts import DIRECT, LAYOUTS, config_of, write_configs
from outrider.errors import ExportError
from outrider.inputs.text.tokenizer import Tokenizer
from outrider_export import export_bundle
from outrider_export.describe.encoder_decoder import geometry_of, kind_of_encoder_decoder
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.describe.plan import check_route, why_not_direct
from outrider_export.describe.special_tokens import eos_of_folder
from outrider_export.direct.describe import describe
from outrider_export.sources.source import locate, read_config, read_json, text_part
from outrider_export.tokenizers.files import copy_files
from outrider_export.tokenizers.ir import write_tokenizer_ir
from outrider_export.tokenizers.job import PROBES, add_tokenizer, check_tokenizer_ir
from outrider_export.tokenizers.vocabulary import Vocabulary
from recorded import NAMES

LETTERS = "ab1 \n'é\u0301日\t\r.,!?…،|[(]^_\u2581-–\u00a0\u3000\u200d🙂AZ९Ⅷ½²ﬁİ<>"
NEEDS = r"which has the architecture '{}', needs .*, which is not installed.*\. Run: pip install"


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
    if name not in DIRECT:
        with pytest.raises(ExportError, match=layout.refused or NEEDS.format(layout.needs_torch)):
            check_route(locate(folder), "openvino")
    else:
        check_route(locate(folder), "openvino")
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


def test_a_tokenizer_that_is_not_known_is_refused(no_torch: None, make_checkpoint: Any, tmp_path: Path) -> None:
    """It is converted beside the weights, and nothing is left of them."""
    folder = shutil.copytree(make_checkpoint("plain"), tmp_path / "model")
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


def differences(ours: Any, theirs: Any) -> list[str]:
    """The fields in which two values differ."""
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        ours, theirs = vars(ours), vars(theirs)
    if isinstance(ours, list | tuple) and len(ours) == len(theirs):
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    if isinstance(ours, dict):
        pairs = {key: differences(value, theirs[key]) for key, value in ours.items()}
        return [f"{key}.{each}" for key, found in pairs.items() for each in found]
    is_same = np.allclose(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
    return [] if is_same else [f"{ours} {theirs}"]


# Transformers 5.5 does not know the others, or does not read their pattern of layers.
JUDGED = [name for name in DIRECT if LAYOUTS[name].config["model_type"] not in {*NAMES, "nemotron_h"}]


@pytest.mark.fast_cases(15)
@pytest.mark.parametrize("name", JUDGED)
def test_configurations_mean_what_transformers_reads_in_them(name: str, tmp_path: Path) -> None:
    """Keys of their time, and of the text part of models that read images, are those that Transformers writes today."""
    from transformers import AutoConfig

    layout = LAYOUTS[name]
    ours = describe(read_config(write_configs(layout, tmp_path / "published")))
    config = layout.config | {"model_type": ours.arch.name} if layout.whole else layout.config
    folder = write_configs(dataclasses.replace(layout, whole="", config=config), tmp_path / "text")
    theirs = AutoConfig.from_pretrained(folder).to_dict()
    assert differences(ours, describe(text_part(theirs))) == []
