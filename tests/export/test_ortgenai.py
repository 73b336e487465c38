"""onnxruntime-genai as a mode of `outrider bench`, on ONNX models that its own builder writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from onnx_runs import run_onnx
from outrider.bundle import Bundle
from outrider.config import Config, GenerationConfig
from outrider.errors import OptionError
from outrider_bench.modes.make import load_modes
from outrider_bench.modes.mode import Run
from outrider_bench.modes.setup import Setup
from outrider_export import import_bundle

og = pytest.importorskip("onnxruntime_genai")

EOS = (402, 400)
PROMPT = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7, 8]
CONFIG = GenerationConfig(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def build(make_checkpoint: Any, build_genai: Any) -> Any:
    """`build("name", seed=0)`: a folder of onnxruntime-genai's, in fp32."""

    def make(name: str, **changes: Any) -> Path:
        folder: Path = build_genai(make_checkpoint(f"ortgenai-{name}", **changes), "fp32", name)
        return folder

    return make


@pytest.fixture(scope="module")
def folders(build: Any) -> dict[str, Path]:
    return {"main": build("main"), "draft": build("draft", seed=1)}


@pytest.fixture(scope="module")
def bundle(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return import_bundle(*folders.values(), output=tmp_path_factory.mktemp("ortgenai") / "bundle")


@pytest.fixture(scope="module")
def setup(bundle: Bundle) -> Setup:
    return Setup(bundle, Config().replace(num_threads=1))


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What onnxruntime-genai decodes with, as it is made."""
    made: list[Any] = []
    real = og.Generator

    def make(*given: Any) -> Any:
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(og, "Generator", make)
    return made


def greedy(folder: Path, num_tokens: int, banned: tuple[int, ...] = EOS) -> list[int]:
    """What onnxruntime says with the builder's own file, all tokens read anew at every step."""
    token_ids = list(PROMPT)
    for _ in range(num_tokens):
        logits = run_onnx(folder / "model.onnx", token_ids)[0][-1]
        logits[list(banned)] = -np.inf
        token_ids.append(int(logits.argmax()))
    return token_ids[len(PROMPT) :]


def run(name: str, setup: Setup, config: GenerationConfig = CONFIG) -> Run:
    (mode,) = load_modes([name], setup)
    return mode.run(PROMPT, config)


def test_every_mode_says_what_the_model_says(setup: Setup, folders: dict[str, Path], generators: list[Any]) -> None:
    wanted = greedy(folders["main"], 24)
    plain, *drafting = load_modes(["ortgenai", "ortgenai-ngram:3", "ortgenai-ngram"], setup)
    drafting += load_modes(["ortgenai-draft:3", "ortgenai-draft"], setup)
    runs = [mode.run(PROMPT, CONFIG) for mode in (plain, *drafting)]
    assert [made.token_ids for made in runs] == [wanted] * 5
    assert all(0 < made.first_token_seconds < made.total_seconds for made in runs)
    stats = [generator.get_speculative_stats() for generator in generators]
    assert stats[0]["rounds"] == 0
    assert [one["effective_k"] for one in stats[1:4:2]] == [3, 3]
    assert all(one["draft_tokens_proposed"] > 0 for one in stats[1:])
    assert [one["draft_forward_passes"] > 0 for one in stats] == [False, False, False, True, True]


def test_the_line_about_a_mode_says_what_it_ran_on(setup: Setup, folders: dict[str, Path]) -> None:
    from importlib.metadata import version

    versions = f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"
    (plain,) = load_modes(["ortgenai"], setup)
    assert plain.description == f"main model fp32, the same files, CPU; 1 threads; {versions}"
    other = replace(setup, peer_models={"ortgenai-draft": folders["draft"]})
    (drafting,) = load_modes(["ortgenai-draft:2"], other)
    assert drafting.description == (
        "main model fp32, the same files, CPU, draft model draft, its own weights; 1 threads a model, not spinning; "
        + versions
    )


def test_an_answer_ends_where_the_bundle_says(setup: Setup, folders: dict[str, Path]) -> None:
    free = greedy(folders["main"], 24, banned=())
    end = free[9]
    ends = msgspec.structs.replace(setup.bundle.manifest.tokenizer, eos_token_ids=(EOS[0], end))
    manifest = msgspec.structs.replace(setup.bundle.manifest, tokenizer=ends)
    ending = replace(setup, bundle=replace(setup.bundle, manifest=manifest))
    short = free[: free.index(end) + 1]
    for name in ("ortgenai", "ortgenai-ngram:3", "ortgenai-draft:3"):
        assert run(name, ending, GenerationConfig(max_new_tokens=24)).token_ids == short
    assert run("ortgenai", setup, CONFIG.replace(stop_token_ids=(greedy(folders["main"], 5)[4],))).token_ids == greedy(
        folders["main"], 5
    )


def test_a_model_of_another_vocabulary_is_refused(setup: Setup, build: Any) -> None:
    small = build("small", vocab_size=403)
    for key, mode in (("ortgenai", "ortgenai"), ("ortgenai-draft", "ortgenai-draft:3")):
        with pytest.raises(OptionError, match="has 403 tokens and the bundle 404"):
            load_modes([mode], replace(setup, peer_models={key: small}))


def test_it_is_asked_for_nothing_that_it_lacks(setup: Setup) -> None:
    for name in ("ortgenai-ngram:0", "ortgenai-draft:17"):
        with pytest.raises(OptionError, match=f"drafts 1 to 16 tokens a round, so '{name}' cannot be run"):
            load_modes([name], setup)
    with pytest.raises(OptionError, match="onnxruntime-genai has no min_p here"):
        run("ortgenai-ngram:3", setup, CONFIG.replace(temperature=1.0, min_p=0.1))
    sampled = CONFIG.replace(temperature=1.0, top_k=4, seed=3)
    for name in ("ortgenai", "ortgenai-ngram:3", "ortgenai-draft:3"):
        assert run(name, setup, sampled).token_ids == run(name, setup, sampled).token_ids


def test_openvino_genai_is_not_given_onnx(setup: Setup, tmp_path: Path) -> None:
    for name in ("genai", "genai-ngram:3", "genai-draft:3"):
        with pytest.raises(OptionError, match="reads OpenVINO, and the main model is in ONNX. Export with"):
            load_modes([name], setup)
    manifest = setup.bundle.manifest
    mixed = msgspec.structs.replace(manifest, main=msgspec.structs.replace(manifest.main, format="openvino"))
    setup = replace(setup, bundle=replace(setup.bundle, manifest=mixed))
    with pytest.raises(OptionError, match="the draft model is in ONNX.*as --peer-model genai-draft=PATH"):
        load_modes(["genai-draft:3"], setup)
    with pytest.raises(OptionError, match="reads ONNX, and the main model is in OpenVINO.*--peer-model ortgenai=PATH"):
        load_modes(["ortgenai"], setup)
    with pytest.raises(OptionError, match=f"--peer-model ortgenai={tmp_path} has no genai_config.json"):
        load_modes(["ortgenai"], replace(setup, peer_models={"ortgenai": tmp_path}))


def test_a_cut_draft_model_needs_another_in_its_place(setup: Setup, folders: dict[str, Path]) -> None:
    manifest = setup.bundle.manifest
    cut = msgspec.structs.replace(manifest.drafters[0], num_proposed_tokens=8)
    setup = replace(setup, bundle=replace(setup.bundle, manifest=msgspec.structs.replace(manifest, drafters=(cut,))))
    with pytest.raises(OptionError, match="was cut. Give a folder .* as --peer-model ortgenai-draft=PATH"):
        load_modes(["ortgenai-draft:3"], setup)
    given = replace(setup, peer_models={"ortgenai-draft": folders["draft"]})
    assert run("ortgenai-draft:3", given).token_ids == greedy(folders["main"], 24)


def test_another_bundle_may_hold_the_draft_model(setup: Setup, bundle: Bundle, folders: dict[str, Path]) -> None:
    manifest = msgspec.structs.replace(bundle.manifest, drafters=())
    alone = replace(setup, bundle=replace(bundle, manifest=manifest))
    with pytest.raises(OptionError, match="needs a draft model"):
        load_modes(["ortgenai-draft:3"], alone)
    drafting = replace(alone, config=setup.config.replace(draft_bundle=str(bundle.folder)))
    assert run("ortgenai-draft:3", drafting).token_ids == greedy(folders["main"], 24)
