"""Gemma 4's assistants draft what Transformers' layers draft from the main model's keys and values.

The text is plain decoding's.
"""

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import outrider
from assistants import Assistant, config_of, write_assistant
from outrider.bundle import Bundle, read_bundle
from outrider.bundle.fit import check_fit
from outrider.bundle.manifest import FileEntry
from outrider.drafters import AssistantModel
from outrider.errors import BundleError, DeviceError, DeviceWarning, ExportError, OptionError
from outrider.models.backends.registry import compile_beside
from outrider.models.tuning.model_spec import specs_of
from outrider_export import export_bundle, pack
from outrider_export.bundles.drafters import add_drafter
from outrider_export.heads.assistant import caches_of
from outrider_export.heads.formats import read_head
from outrider_export.heads.write import write_head
from outrider_export.sources.source import locate
from shapes import GEMMA4_DENSE, make_model, save_model
from toys import in_threads

TOKENS = 404
EXACT: dict[str, Any] = {"precision": "f32", "cache_size": 0.02, "keep_records": False}
ANSWER: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
DRAFTED: dict[str, Any] = ANSWER | {"drafter": "assistant", "num_assistant_tokens": 3}


def prompt_of(seed: int, length: int) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(0, 400, length).tolist()
    return token_ids


@dataclasses.dataclass(frozen=True)
class Made:
    """main, assistant: of PyTorch. folder: of the assistant's checkpoint."""

    bundle: Bundle
    main: Any
    assistant: Assistant
    folder: Path


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Gemma 4's smaller form, whose last layers have no keys and values, and an assistant with clusters."""
    root = tmp_path_factory.mktemp("clustered")
    main = make_model("gemma4_text")
    assistant = Assistant(config_of(main, ordered=True))
    folder = write_assistant(root / "assistant", assistant)
    save_model(main, root / "main")
    options: dict[str, Any] = {"weights": "fp32", "draft_weights": "fp32"}
    return Made(export_bundle(root / "main", folder, output=root / "bundle", **options), main, assistant, folder)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The larger form, whose keys are its values where attention is full."""
    root = tmp_path_factory.mktemp("dense")
    main = make_model("gemma4_text", **GEMMA4_DENSE)
    save_model(main, root / "main")
    export_bundle(root / "main", output=root / "bundle", weights="fp32")
    assistant = Assistant(config_of(main, ordered=False), seed=1)
    folder = write_assistant(root / "assistant", assistant)
    return Made(add_drafter(root / "bundle", folder, weights="fp32"), main, assistant, folder)


@pytest.fixture(scope="module")
def engine(clustered: Made) -> Iterator[outrider.Engine]:
    with outrider.load(clustered.bundle.folder, **EXACT) as made:
        yield made


@pytest.fixture(scope="module")
def dense_engine(dense: Made) -> Iterator[outrider.Engine]:
    with outrider.load(dense.bundle.folder, **EXACT) as made:
        yield made


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any]]:
    """Each draft, and the text that it was made for."""
    found: list[tuple[list[int], Any]] = []
    propose = AssistantModel.propose

    def spy(self: AssistantModel, requests: Any) -> Any:
        drafts = propose(self, requests)
        found.extend(([*each.sequence.token_ids], made) for each, made in zip(requests, drafts, strict=True))
        return drafts

    monkeypatch.setattr(AssistantModel, "propose", spy)
    return found


def check_drafts(made: Made, seen: list[tuple[list[int], Any]]) -> None:
    for token_ids, draft in (*seen[:2], seen[-2]):
        expected, chances = made.assistant.draft(made.main, token_ids, len(draft.token_ids), TOKENS)
        assert draft.token_ids == expected
        np.testing.assert_allclose(draft.confidences, chances, rtol=1e-3)


def test_drafts_are_those_of_transformers(clustered: Made, engine: outrider.Engine, seen: Any) -> None:
    """Before and after the window's and a block's end, after a prefix from the cache, and for texts side by side."""
    rule: dict[str, Any] = {"assistant_confidence_threshold": 1e-9}
    for length in (1, 9, 60):
        seen.clear()
        prompt = prompt_of(length, length)
        plain = engine.generate(prompt, drafter=None, **ANSWER)
        for _ in range(2):
            drafted = engine.generate(prompt, **DRAFTED, **rule)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.num_draft_tokens > 20
        assert drafted.stats.num_cached_tokens == length - 1
        check_drafts(clustered, seen)
    seen.clear()
    prompts = [prompt_of(1, 70), prompt_of(2, 5), prompt_of(3, 33)]
    plain_ids = [engine.generate(each, drafter=None, **ANSWER).token_ids for each in prompts]
    together: dict[int, list[int]] = {}
    in_threads(lambda i: together.update({i: engine.generate(prompts[i], **DRAFTED, **rule).token_ids}), range(3))
    assert [together[i] for i in range(3)] == plain_ids
    check_drafts(clustered, seen)


@pytest.mark.slow
def test_drafts_of_a_dense_model_are_those_of_transformers(
    dense: Made, dense_engine: outrider.Engine, seen: Any
) -> None:
    prompt = prompt_of(5, 50)
    plain = dense_engine.generate(prompt, drafter=None, **ANSWER)
    drafted = dense_engine.generate(prompt, assistant_confidence_threshold=1e-9, **DRAFTED)
    assert drafted.token_ids == plain.token_ids
    check_drafts(dense, seen)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 20}], ids=str)
def test_sampled_texts_are_those_of_plain_decoding(engine: outrider.Engine, sampling: dict[str, Any]) -> None:
    prompt = prompt_of(6, 40)
    plain = engine.generate(prompt, drafter=None, seed=3, **ANSWER, **sampling)
    drafted = engine.generate(prompt, seed=3, **DRAFTED, **sampling)
    assert drafted.token_ids == plain.token_ids
    drawn = engine.generate(prompt, sampling="rejection", **DRAFTED, **sampling)
    assert drawn.stats.num_draft_tokens >= drawn.stats.num_drafts > 3


def test_a_cancelled_answer_leaves_nothing_behind(engine: outrider.Engine) -> None:
    prompt = prompt_of(7, 45)
    plain = engine.generate(prompt, drafter=None, **ANSWER).token_ids
    cancel = threading.Event()
    chunks = []
    for chunk in engine.stream(prompt, cancel=cancel, **DRAFTED | {"max_new_tokens": 200}):
        chunks.append(chunk)
        if len(chunks) > 3:
            cancel.set()
    assert 3 < chunks[-1].stats.num_draft_tokens < 200
    model: Any = engine.draft_models["assistant"]
    assert not model._hidden
    assert not model._states
    assert engine.generate(prompt, **DRAFTED).token_ids == plain


def test_it_takes_no_cache_of_its_own(clustered: Made, engine: outrider.Engine) -> None:
    [entry] = clustered.bundle.manifest.drafters
    assert (entry.kind, entry.features, entry.traits.uses_main_cache) == ("assistant", ("last_hidden_state",), True)
    assert engine.cache["assistant"].bytes_per_token == 0
    assert engine.loaded["assistant"].cost.near
    assert engine.choices["assistant"].trials == ()  # it cannot be compiled alone


def test_a_packed_one_can_be_added(clustered: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(clustered.bundle.folder, tmp_path / "bundle")
    pack(clustered.bundle, "assistant", tmp_path / "packed")
    assert add_drafter(folder, tmp_path / "packed", name="again").manifest.drafters[-1].kind == "assistant"


def without(name: str) -> "Change":
    def change(tensors: dict[str, Any]) -> None:
        del tensors[name]

    return change


def twice(tensors: dict[str, Any]) -> None:
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]


def with_fewer_tokens(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:392]
    tensors["masked_embedding.token_ordering"] = np.arange(392)


Change = Callable[[dict[str, Any]], None]
WRONG: dict[str, tuple[dict[str, Any], Change | None, str]] = {
    "another main model": ({"backbone_hidden_size": 80}, None, r"is float32 \[32, 128\], and has to be .* \[32, 160\]"),
    "other keys": (
        {"num_key_value_heads": 1},
        None,
        "reads 1 heads of keys of 16 numbers where attention is in a sliding window, and this main model has 2 of 16",
    ),
    "experts": ({"enable_moe_block": True}, None, "enable_moe_block True, and assistants with False are known"),
    "layers of its own": ({"num_kv_shared_layers": 2}, None, "num_kv_shared_layers 2, and all 4 layers of an"),
    "centroids": ({"num_centroids": 55}, None, "55 centroids of which 5 are chosen, for 448 tokens: they have to be"),
    "no order": ({}, without("masked_embedding.token_ordering"), "token_ordering' is missing, and has to list each of"),
    "a token twice": ({}, twice, "token_ordering' is damaged"),
    "fewer tokens": ({"vocab_size": 392}, with_fewer_tokens, "logits for 392 tokens, and the main model has 404"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(clustered: Made, tmp_path: Path, case: str) -> None:
    changes, change, said = WRONG[case]
    tensors = {name: values.copy() for name, values in clustered.assistant.tensors.items()}
    if change is not None:
        change(tensors)
    source = write_assistant(tmp_path / "assistant", clustered.assistant, tensors, **changes)
    folder = shutil.copytree(clustered.bundle.folder, tmp_path / "bundle")
    with pytest.raises(ExportError, match=said) as caught:
        add_drafter(folder, source, name="other")
    assert "\n" not in str(caught.value)
    assert read_bundle(folder).manifest.drafters == clustered.bundle.manifest.drafters
    assert not (folder / "other").exists()


def test_an_assistant_of_a_wider_main_model_is_refused(clustered: Made, dense: Made) -> None:
    main = msgspec.structs.replace(clustered.bundle.manifest.main.geometry, hidden_size=128)
    with pytest.raises(ExportError, match=r"is for a main model with hidden_size 64, and this one has 128"):
        read_head(clustered.folder, main)
    head = read_head(clustered.folder, dense.bundle.manifest.main.geometry)
    with pytest.raises(ExportError, match="this main model has 1 of 32 there. Name the Gemma 4 that"):
        caches_of(head, dense.bundle.manifest.main.geometry)


def test_a_main_model_in_onnx_is_refused(clustered: Made, tmp_path: Path) -> None:
    manifest = clustered.bundle.manifest
    main = msgspec.structs.replace(manifest.main, format="onnx")
    head = read_head(clustered.folder, main.geometry)
    with pytest.raises(ExportError, match="OpenVINO's format, and this one is in onnx. Export the main model"):
        write_head(tmp_path, main, head, "assistant", "fp32", None, locate(clustered.folder, None))
    weights = [FileEntry("main/model.onnx", 1, "0" * 64), FileEntry("assistant/model.onnx", 1, "0" * 64)]
    with pytest.raises(
        BundleError, match="'assistant' of kind assistant reads the cache of a main model in OpenVINO's"
    ):
        check_fit(msgspec.structs.replace(manifest, main=main, files=(*manifest.files, *weights)))


def test_a_cache_that_it_cannot_read_is_refused(
    clustered: Made, dense_engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [spec] = specs_of(clustered.bundle, clustered.bundle, clustered.bundle.manifest.drafters)[1]
    main = cast("Any", dense_engine.main)
    with pytest.raises(BundleError, match="with 2 heads of 32 numbers, and the main model has 1 of 32"):
        compile_beside(spec, main)
    for name, value, said in (
        ("block_size", 7, "CPU stores the numbers of a key apart from each other, and an assistant reads keys as"),
        ("cache_precision", "u8", "cache_precision is 'u8', and an assistant reads a cache that is not quantised"),
    ):
        monkeypatch.setattr(main, name, value)
        with pytest.raises(DeviceError, match=said):
            compile_beside(spec, main)
        monkeypatch.undo()


@pytest.mark.slow
def test_auto_leaves_out_one_that_cannot_read_the_cache(clustered: Made) -> None:
    options = EXACT | {"cache_precision": "u8"}
    with pytest.warns(DeviceWarning, match=r"The drafter 'assistant' is left out: cache_precision is 'u8'") as told:
        engine = outrider.load(clustered.bundle.folder, **options)
    with engine:
        assert len([each for each in told if each.category is DeviceWarning]) == 1
        assert engine.generate(prompt_of(1, 20), max_new_tokens=4).token_ids
        with pytest.raises(OptionError, match="drafter='assistant' was left out, as it does not run beside this main"):
            engine.generate(prompt_of(1, 20), drafter="assistant")
    with pytest.raises(DeviceError, match="cache_precision is 'u8', and an assistant reads"):
        outrider.load(clustered.bundle.folder, drafter="assistant", **options)
