"""A packed drafter is in another bundle what it was in the first, without the packages of the extra."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outrider
from heads import write_head
from outrider.bundle import Bundle
from outrider.errors import ExportError, OptionError
from outrider_export import extras
from outrider_export.bundles.drafters import add_drafter
from outrider_export.heads.packed import PACKED_NAME, pack

KINDS = ("eagle3", "dflash", "dspark")
ANSWER: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "num_assistant_tokens": 3}


@pytest.fixture
def packed(tiny: Path, tmp_path: Path) -> Path:
    made = shutil.copytree(tiny, tmp_path / "made")
    return pack(add_drafter(made, write_head(tmp_path / "head", "eagle3")), "eagle3", tmp_path / "packed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_as_in_the_first_bundle(kind: str, tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first, second = (shutil.copytree(tiny, tmp_path / name) for name in ("first", "second"))
    made = add_drafter(first, write_head(tmp_path / kind, kind))
    packed = pack(made, kind, tmp_path / "packed")
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    added = add_drafter(second, packed, name="again")
    added.check_hashes()
    entry = added.manifest.drafters[-1]
    assert (entry.name, entry.model.folder) == ("again", "again")
    texts = []
    for bundle, name in ((first, kind), (second, "again")):
        with outrider.load(bundle, cache_size=0.02) as engine:
            drafted = engine.generate("hello hello", drafter=name, **ANSWER)
            assert drafted.token_ids == engine.generate("hello hello", drafter=None, **ANSWER).token_ids
            texts.append((drafted.token_ids, drafted.stats.num_draft_tokens, drafted.stats.num_accepted_tokens))
    assert texts[0] == texts[1]


def test_what_is_no_drafter_of_its_own_is_not_packed(openvino_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="The bundle has no drafter 'eagle'"):
        pack(openvino_bundle, "eagle", tmp_path / "packed")
    with pytest.raises(OptionError, match="of kind draft_model, which cannot be packed"):
        pack(openvino_bundle, openvino_bundle.manifest.drafters[0].name, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def be_for_another(packed: Path) -> None:
    content = json.loads((packed / PACKED_NAME).read_text())
    content["main"]["hidden_size"] += 1
    (packed / PACKED_NAME).write_text(json.dumps(content))


BIN = "openvino_model.bin"


@pytest.mark.parametrize(("change", "options", "said"), [
    (lambda packed: (packed / BIN).write_bytes((packed / BIN).read_bytes()[:-1] + b"?"), {}, f"{BIN} is damaged"),
    (lambda packed: (packed / BIN).unlink(), {}, f"{BIN} is damaged"),
    (lambda packed: (packed / PACKED_NAME).write_text("{"), {}, "drafter.json cannot be read"),
    (be_for_another, {}, "is for another main model, of architecture .*, with 2 layers of 65"),
    (None, {"weights": "fp16"}, "weights='fp16' cannot be had .* in int8. Add the drafter's checkpoint"),
    (None, {"draft_vocab": 100}, "draft_vocab cannot be chosen"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    change: Callable[[Path], object] | None, options: dict[str, Any], said: str, packed: Path, folder: Path
) -> None:
    before = (folder / "outrider.json").read_bytes()
    if change:
        change(packed)
    with pytest.raises(OptionError if options else ExportError, match=said):
        add_drafter(folder, packed, **options)
    assert (folder / "outrider.json").read_bytes() == before
    assert not (folder / "eagle3").exists()
