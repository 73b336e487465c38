"""Heads for main models whose layers keep states: what they start from, what they learn, and that they draft."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from exports import check_answers
from outrider.bundle import read_bundle
from outrider.errors import ExportError
from outrider_distill.answers import write_data
from outrider_distill.data import Data, Recipe
from outrider_distill.main_model import MainGraph, read_teacher
from outrider_distill.prompts import DistillPrompt
from outrider_distill.train.files import save as save_head
from outrider_distill.train.fit import fit, start_head
from outrider_export.bundles.drafters import add_drafter
from outrider_export.direct.convert import open_weights
from outrider_export.direct.graph import build
from outrider_export.direct.pack import pack
from outrider_export.direct.save import save
from shapes import make_model, save_model

ATTENDING = {"lfm2": 2, "qwen3_5_text": 3, "granitemoehybrid": 2, "qwen3_next": 3}  # layers with attention
PROMPTS = [DistillPrompt(f"Count from {i} to {i + 9}, please.") for i in range(80)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ATTENDING)
def test_heads_start_from_layers_with_attention(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "checkpoint")
    weights = open_weights(tmp_path / "checkpoint", is_gguf=False)
    decoder = weights.decoder
    (tmp_path / "main").mkdir()
    packed = pack(weights, "fp32", tmp_path / "main" / "openvino_model.bin", lambda _: None)
    save(*build(decoder, weights, packed), tmp_path / "main" / "openvino_model.xml")
    written = ov.Core().read_model(tmp_path / "main" / "openvino_model.xml")
    graph = MainGraph(written, Path(), len(decoder.layers), decoder.num_heads, decoder.sizes.head_size)
    found = graph.starting_layer(ATTENDING[name])
    layer = model.model.layers[ATTENDING[name]]
    queries = layer.self_attn.q_proj.weight.detach().numpy()
    if decoder.arch.attention.gate == "queries":  # the rows of a head's gate follow those of its queries
        queries = queries.reshape(decoder.num_heads, 2, decoder.sizes.head_size, -1)[:, 0].reshape(-1, queries.shape[1])
    assert np.array_equal(found["self_attn.q_proj.weight"], queries)
    keys = layer.self_attn.k_proj.weight.detach().numpy()
    assert np.array_equal(found["self_attn.k_proj.weight"], keys)
    assert found["input_layernorm.weight"].shape == found["post_attention_layernorm.weight"].shape == (64,)
    with pytest.raises(ExportError, match="One of these is missing. Train a draft model"):
        graph.layer(ATTENDING[name] + 1 if name == "lfm2" else 0)  # the layer before has attention, and is not taken


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_heads_learn_from_states_and_draft_losslessly(name: str, convert: Any, tmp_path: Path) -> None:
    kinds = ["conv", "full_attention"] * 3 if name == "lfm2" else None
    changes: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": kinds}
    bundle, _ = convert(save_model(make_model(name, **changes), tmp_path / "checkpoint"), weights="fp32")
    folder: Path = shutil.copytree(bundle.folder, tmp_path / "main")
    bundle = read_bundle(folder)
    recipe = Recipe(400, taps=True, max_new_tokens=16)
    write_data(tmp_path / "data", bundle, recipe, prompts=PROMPTS, batch_size=16)
    data = Data(tmp_path / "data")
    head, config = start_head(read_teacher(bundle), data)
    report = fit(head, data, num_steps=4)
    assert report["steps"] == 4
    save_head(head, config, tmp_path / "head", report)
    add_drafter(folder, tmp_path / "head", name="learned")
    check_answers(folder, "Count from 3 to 12, please.", "learned")
