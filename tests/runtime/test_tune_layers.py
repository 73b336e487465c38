"""`outrider tune-layers` finds layers to draft with, and adds that drafter."""

import itertools
import json
import shutil
from contextlib import closing
from typing import Any

import pytest

from calls import rows_of_call

pytest.importorskip("gguf", reason="writes the file that the bundle is made of")

from pathlib import Path

import msgspec

import outrider
from layered import NUM_LAYERS, make_layered, with_layers
from outrider.bundle import Bundle, read_bundle
from outrider.bundle.manifest import describe_layers
from outrider.cli import run
from outrider.errors import BundleError, OptionError
from outrider.models.backends.openvino_layers import OpenVINOLayers
from outrider.types import Chunk
from outrider_bench.layers import DrafterLayers, _Reader, add_layers, check_name, probe_engine, search


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_layered(tmp_path_factory.mktemp("layered"))


@pytest.fixture
def layered(original: Bundle, tmp_path: Path) -> Bundle:
    shutil.copytree(original.folder, tmp_path / "bundle")
    return read_bundle(tmp_path / "bundle")


CONFIG = outrider.Config().replace(cache_size=0.02, ignore_eos=True)


def judged(agreements: dict[range, float], seen: list[range]) -> Any:
    """Runs of layers to leave out agree as said, others not at all; each layer costs a tenth of a pass."""

    def judge(skipped: range) -> DrafterLayers:
        seen.append(skipped)
        agreement = agreements.get(skipped, 0.0)
        layers = tuple(i for i in range(10) if i not in skipped)
        cost = len(layers) / 10
        return DrafterLayers(layers, agreement, cost, 1, (1 + agreement) / (1 + cost))

    return judge


def test_the_search_follows_the_best_runs() -> None:
    seen: list[range] = []
    good = {range(4, 5): 0.8, range(4, 6): 0.8, range(3, 6): 0.8, range(3, 7): 0.8, range(1, 9): 1.0}
    found = search(10, judged(good, seen))
    assert seen[:9] == [range(i, i + 1) for i in range(1, 10)]  # never the first layer
    assert len(seen) == len({*seen})
    best = max(found, key=lambda each: each.speed_up)
    assert best.layers == (0, 1, 2, 7, 8, 9)
    assert range(1, 9) not in seen  # nothing on the way there agrees


def test_agreement_is_that_of_reading_the_answer_token_by_token(original: Bundle) -> None:
    prompt, layers = [30, 90, 150], (0, 1, 3, 4)
    with probe_engine(original, CONFIG) as engine:
        main: Any = engine.main
        answer = engine.generate(prompt, max_new_tokens=30, drafter=None).token_ids
        with closing(_Reader(main, [(prompt, answer), (prompt, answer)])) as reader:
            assert reader.agreement(tuple(range(NUM_LAYERS))) == 1
            agreement = reader.agreement(layers)
            assert reader.agreement(layers) == agreement
        part = OpenVINOLayers(main, layers)
        part.allocate(0)
        slot, num_right = main.open(40), 0
        main.submit([Chunk(slot, prompt[:-1], 0)]).wait()
        for token, after in itertools.pairwise([prompt[-1], *answer]):
            (row,) = rows_of_call(part, Chunk(slot, [token], 1))
            num_right += int(row.argmax()) == after
    assert 0 < num_right < len(answer)
    assert agreement == num_right / len(answer)


def test_a_drafter_is_added_and_replaced(layered: Bundle) -> None:
    files = {path: path.stat().st_mtime_ns for path in layered.folder.rglob("*") if path.name != "outrider.json"}
    made = add_layers(layered, "self", (0, 2))
    made = add_layers(add_layers(made, "other", (0, 3)), "self", (0, 1))
    assert [(each.name, each.layers) for each in made.manifest.drafters] == [("other", (0, 3)), ("self", (0, 1))]
    assert made.manifest.files == layered.manifest.files
    assert {path: path.stat().st_mtime_ns for path in made.folder.rglob("*") if path.name != "outrider.json"} == files
    with pytest.raises(BundleError, match="damaged"):
        add_layers(made, "bad", (7,))
    assert read_bundle(layered.folder) == made


def test_names_that_have_another_meaning_are_refused(layered: Bundle) -> None:
    entry = msgspec.structs.replace(
        with_layers(layered, eagle=(0,)).manifest.drafters[0], kind="draft_model", layers=()
    )
    taken = Bundle(layered.folder, msgspec.structs.replace(layered.manifest, drafters=(entry,)))
    for name in ("main", "auto", "eagle", "", "a/b", "-x"):
        with pytest.raises(OptionError, match="is no name for a drafter here"):
            check_name(taken, name)
    check_name(with_layers(layered, eagle=(0,)), "eagle")


def test_a_model_in_onnx_or_of_one_layer_is_refused(layered: Bundle) -> None:
    main = layered.manifest.main
    one = msgspec.structs.replace(main, geometry=msgspec.structs.replace(main.geometry, num_layers=1))
    for other, said in ((msgspec.structs.replace(main, format="onnx"), "has 5 in onnx"), (one, "has 1 in openvino")):
        bundle = Bundle(layered.folder, msgspec.structs.replace(layered.manifest, main=other))
        with pytest.raises(OptionError, match=f"main models of several layers in OpenVINO's format, .* {said}"):
            probe_engine(bundle, CONFIG)


@pytest.mark.slow
def test_the_command(layered: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the quick brown fox"}), encoding="utf-8")
    options = ["--prompts", str(prompts), "--max-new-tokens", "24", "--cache-size", "0.02"]
    given = ["tune-layers", str(layered.folder), *options]
    assert run([*given, "--dry-run"]) == 0
    assert "agreement" in capsys.readouterr().out
    assert not read_bundle(layered.folder).manifest.drafters
    assert run([*given, "--name", "mine", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (entry,) = read_bundle(layered.folder).manifest.drafters
    assert (entry.name, list(entry.layers)) == ("mine", said["found"][0]["layers"])
    assert run(["inspect", str(layered.folder)]) == 0
    assert f"layers {describe_layers(entry.layers)} of the main model" in capsys.readouterr().out
