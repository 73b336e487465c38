"""Slices of checkpoints, and the weights that are fastest by them: `outrider tune-weights`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.config import Config
from outrider.errors import ExportError
from outrider.models.tuning.model_spec import ModelSpec
from outrider_export import export_bundle
from outrider_export.bundles.demo_model import FILE
from outrider_export.describe.plan import make_plan
from outrider_export.direct.convert import open_weights
from outrider_export.direct.graph import build
from outrider_export.direct.pack import matrices_of, pack
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import locate, read_config
from outrider_export.weights_choice.cut import describe_whole, write_slice
from outrider_export.weights_choice.speed import FormSpeed, FormTrial
from shapes import make_model, save_model

if TYPE_CHECKING:
    from pathlib import Path


def test_layers_that_differ_in_their_sizes_are_not_cut(tmp_path: Path) -> None:
    """Keys of layers that are left out would be missing."""
    folder = save_model(make_model("gemma4_text"), tmp_path / "gemma-4")
    with pytest.raises(ExportError, match="gemma-4 cannot be cut into slices: its layers differ in their sizes"):
        describe_whole(locate(folder))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_slice_has_the_tensors_of_its_layers(kind: str, tied: Path, make_gguf: Any, tmp_path: Path) -> None:
    source = locate(tied if kind == "folder" else make_gguf("tied-f32", tied, quantisation="F32"))
    assert describe_whole(source) == (2, True)
    token_ids = np.array([3, 4, 7], np.int64)
    write_slice(source, 1, tmp_path / "slice", token_ids)
    config = read_config(tmp_path / "slice")
    assert (config["num_hidden_layers"], config["vocab_size"]) == (1, 3)
    whole, cut = tensors_of(tied), tensors_of(tmp_path / "slice")
    assert cut.keys() == {name for name in whole if not name.startswith("model.layers.1.")}
    for name, tensor in cut.items():
        wanted = whole[name].numbers()
        wanted = wanted[token_ids] if name == "model.embed_tokens.weight" else wanted
        np.testing.assert_allclose(tensor.numbers(), wanted, atol=1e-3, err_msg=name)


def test_a_slice_says_its_layers_by_the_published_key(tmp_path: Path) -> None:
    source = locate(save_model(make_model("exaone"), tmp_path / "whole"))
    write_slice(source, 1, tmp_path / "slice")
    assert len(open_weights(tmp_path / "slice", is_gguf=False).decoder.layers) == 1


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "name", ["lfm2_moe", "qwen3_5_moe_text", "granitemoehybrid", "granitemoe", "gpt_oss", "nemotron_h"]
)
def test_a_slice_of_a_hybrid_or_a_mixture_is_a_model(name: str, tmp_path: Path) -> None:
    """Its layers are the first one with attention, and those from the first on."""
    source = locate(save_model(make_model(name), tmp_path / "whole"))
    count, _ = describe_whole(source)
    write_slice(source, count, tmp_path / "slice")
    whole, cut = open_weights(tmp_path / "whole", is_gguf=False), open_weights(tmp_path / "slice", is_gguf=False)
    kinds = [layer.state and layer.state.kind for layer in whole.decoder.layers]
    first = kinds.index(None)
    chosen = [first, *range(count - 1)] if any(kinds) else [*range(count)]
    assert [layer.state and layer.state.kind for layer in cut.decoder.layers] == [kinds[i] for i in chosen]
    for i, old in enumerate(chosen):
        for part in [part for part in matrices_of(whole) if part.startswith(f"model.layers.{old}.")]:
            values = cut.matrix(part.replace(f".{old}.", f".{i}.", 1)).read(slice(None))
            np.testing.assert_allclose(values, whole.matrix(part).read(slice(None)), atol=1e-3, err_msg=part)
    packed = pack(cut, "int8", tmp_path / "weights", lambda _: None)
    build(cut.decoder, cut, packed)  # nothing is missing


def trial_of(checkpoint: Path, config: Config | None = None) -> FormTrial:
    return FormTrial(make_plan("main", locate(checkpoint), "openvino", None), config or Config())


def test_slices_tell_the_whole_models_size(make_checkpoint: Any, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("of-9", num_hidden_layers=9)
    with trial_of(checkpoint) as trial:
        (predicted,) = trial.measure([("openvino", "int8")], (1, 2))
    whole = export_bundle(checkpoint, output=tmp_path / "whole", weights="int8")
    assert not trial.left_out
    assert predicted.num_bytes == pytest.approx(ModelSpec("main", whole, whole.manifest.main).size, rel=0.02)
    assert min(predicted.seconds.values()) > 0


def test_four_bits_lose_more_than_eight_and_sixteen_nothing(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("of-9", num_hidden_layers=9)
    config = Config().replace(precision="f32")  # bf16 may be the faster one, and rounds more
    with trial_of(checkpoint, config) as trial:
        forms = trial.measure([("openvino", weights) for weights in ("fp16", "int8", "int4")], (1,))
        lost = [form.slice_kl or 0.0 for form in trial.slice_kl(forms)]
    assert abs(lost[0]) < 1e-6
    assert 10 * abs(lost[0]) < lost[1] < lost[2] / 3


def test_auto_is_no_slower_than_plain_and_gains_where_rows_are_cheap() -> None:
    cheap = FormSpeed("openvino", "int8", {1: 0.010, 2: 0.010, 4: 0.010, 8: 0.010}, {}, 1, "f32")
    dear = FormSpeed("onnx", "int4", {1: 0.008, 2: 0.016, 4: 0.032, 8: 0.064}, {}, 1, "auto")
    assert dear.plain > cheap.plain
    assert dear.auto(0.002) == dear.plain
    assert cheap.auto(0.0) == pytest.approx(sum(0.6**i for i in range(8)) / 0.010)


@pytest.mark.slow
def test_the_command(make_checkpoint: Any, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(make_checkpoint("of-9", num_hidden_layers=9))
    assert run(["tune-weights", checkpoint, "--draft", checkpoint, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["format"] for row in said["drafts"]} == {row["format"] for row in said["forms"]}
    made = {(row["format"], row["weights"]) for row in said["forms"]}
    assert made >= {("openvino", "int8"), ("openvino", "int4")}
    assert {"onnx", *(form for form, _ in made)} == {"openvino", "onnx"} | said["left_out"].keys()
    assert said["plain"].startswith(f"outrider export {checkpoint} --format ")
    assert run(["tune-weights", str(tiny)]) == 2
    assert "is a bundle, whose weights are chosen already" in capsys.readouterr().err


@pytest.mark.slow
def test_the_slices_of_a_real_model(smollm2: Path) -> None:
    with trial_of(smollm2.parents[1] / FILE) as trial:
        (form,) = trial.measure([("openvino", "int8")], (1,))
    bundle = read_bundle(smollm2)
    assert form.num_bytes == pytest.approx(ModelSpec("main", bundle, bundle.manifest.main).size, rel=0.02)
