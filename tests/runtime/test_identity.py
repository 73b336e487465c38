"""What is measured of a model is measured again when a fact that it depends on is another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.bundle import Bundle
from outrider.bundle.vision import PatchesEntry
from outrider.config import DeviceConfig
from outrider.models.backends.devices import Device
from outrider.models.backends.processor import ProcessorFacts
from outrider.models.cost import stored as costs
from outrider.models.tuning import loading, model_spec, probe
from outrider.models.tuning.loading import LoadedModel
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Choice, Setting
from outrider.system import saved
from outrider.testing import FakeBackend, save_toy_bundle
from outrider.types import Exactness, Rounding, RowRule


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle")


@pytest.fixture
def part(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    """A main model, whose bundle has a vision encoder, too."""
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    return ModelSpec("main", bundle, bundle.manifest.main)


def has_driver(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    gpu = Device(name="GPU", format="openvino", full_name="one", driver=driver)
    for module in (model_spec, probe):
        monkeypatch.setattr(module, "find_device", lambda *_: gpu)


def compiled() -> Any:
    made: Any = FakeBackend(24)
    made.fingerprint, made.cache_precision, made.bytes_per_token = {"fake": "yes"}, "f32", 4.0
    return made


def with_changed(bundle: Bundle, file: str) -> Bundle:
    """The bundle with another file in this place."""
    files = tuple(
        msgspec.structs.replace(entry, sha256="f" * 64) if entry.path == file else entry
        for entry in bundle.manifest.files
    )
    assert files != bundle.manifest.files
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, files=files))


def test_a_setting_that_is_exact_with_one_driver_is_measured_with_another(
    part: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_driver(monkeypatch, "1")
    part.on("GPU", DeviceConfig()).saved_choice.write(Choice(Setting("f32", "f32")))
    assert loading.is_settled(part.on("GPU", DeviceConfig()))
    has_driver(monkeypatch, "2")
    assert not loading.is_settled(part.on("GPU", DeviceConfig()))


def test_a_setting_is_one_for_all_drafters_and_folders(part: ModelSpec) -> None:
    """Else texts would depend on the drafter."""
    part.saved_choice.write(Choice(Setting("f32", "f32")))
    assert loading.is_settled(replace(part, features=("hidden.1",)))
    assert loading.is_settled(part.on("CPU", DeviceConfig(properties={"CACHE_DIR": "anywhere"})))
    assert loading.is_settled(part.on("CPU", DeviceConfig(properties={"session.intra_op.allow_spinning": "0"})))
    assert not loading.is_settled(replace(part, cuts=(1, 2)))
    assert not loading.is_settled(part.on("CPU", DeviceConfig(properties={"ENABLE_CPU_PINNING": False})))


def test_threads_are_those_of_a_quota_unless_a_number_is_given(
    part: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_spec, "this_processor", lambda: ProcessorFacts("one", quota=3))
    threads = [part.on("CPU", DeviceConfig(num_threads=given)).options.num_threads for given in (0, 1, 8)]
    assert threads == [3, 1, 8]


def in_eights(part: ModelSpec, backend: Any) -> tuple[ModelSpec, Any]:
    backend.use(Exactness(rule=RowRule(call=Rounding(8, 8))))
    return part, backend


@pytest.mark.parametrize(("device", "change"), [
    pytest.param("CPU", in_eights, id="padding"),
    pytest.param("CPU", lambda part, made: (part.on("CPU",
     DeviceConfig(properties={"SCHEDULING_CORE_TYPE": "ECORE_ONLY"})), made), id="properties"),
    pytest.param("NPU", lambda part, made: (part.on("NPU", DeviceConfig(npu_max_prompt_tokens=2048)), made),
     id="sizes of an NPU"),
])  # fmt: skip
def test_a_cost_is_of_calls_that_were_timed(
    part: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    change: Callable[[ModelSpec, Any], tuple[ModelSpec, Any]],
) -> None:
    monkeypatch.setattr(model_spec, "find_device", lambda *_: None)
    here, backend = part.on(device, DeviceConfig()), compiled()
    known = costs._file(here, backend).path
    assert costs._file(replace(here, features=("hidden.1",)), backend).path == known
    assert costs._file(*change(here, backend)).path != known


def test_saved_prefixes_are_of_one_vision_encoder(part: ModelSpec) -> None:
    """An image's key is that of its pixels."""
    vision = PatchesEntry(
        folder="draft", weights="fp32", tile_size=8, tokens_per_tile=1, image_token_id=0, image_token="i",  # noqa: S106
        mean=(0.0,) * 3, std=(1.0,) * 3, rescale_factor=1.0, resample=1,
    )  # fmt: skip
    seeing = replace(part, model=msgspec.structs.replace(part.model, vision=vision))
    other = replace(seeing, bundle=with_changed(part.bundle, "draft/openvino_model.bin"))
    choice = Choice(Setting("f32", "f32"))
    ours, theirs = (LoadedModel(each, choice, compiled()).identity for each in (seeing, other))
    assert ours != theirs
