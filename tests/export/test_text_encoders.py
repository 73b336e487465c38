"""Tiny random BERTs and their like: exported, and compared with Transformers' own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import outrider
from outrider.bundle.manifest import Pooling, TextEncoderEntry
from outrider.errors import ExportError, OptionError
from outrider_export import export_bundle
from outrider_export.sources.source import locate
from outrider_export.text_encoders.checkpoint import describe, kind_of_text_encoder
from text_encoders import write_bert

TEXTS = ["The sled: 1, 2, 3!", "a", "snow falls on dogs and sleds, all night long."]
MODULES = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")]
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return folder


def add_pooling(folder: Path, **modes: bool) -> None:
    """What sentence-transformers writes beside a model."""
    (folder / "modules.json").write_text(json.dumps(MODULES), encoding="utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | modes), "utf-8")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "bert"
    write_bert(folder)
    return folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "reranker"
    write_bert(folder, "BertForSequenceClassification", num_labels=1)
    return folder


def states_of(folder: Path, text: str) -> Any:
    """float32 [tokens, width] of Transformers."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()


POOLED: dict[Pooling, Any] = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(0),
    "last_token": lambda states: states[-1],
}


def test_embeddings_are_transformers(convert: Any, bert: Path) -> None:
    bundle, _ = convert(bert, weights="fp32")
    states = [states_of(bert, text) for text in TEXTS]
    for pooling, pool in POOLED.items():
        main = msgspec.structs.replace(bundle.manifest.main, text_encoder=TextEncoderEntry("embedding", pooling))
        changed = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, main=main))
        with outrider.Embedder(changed) as embedder:
            found = embedder.embed(TEXTS).vectors
        for row, own in zip(found, map(pool, states), strict=True):
            assert row @ own / np.linalg.norm(own) == pytest.approx(1.0, abs=1e-5)


def test_scores_are_transformers(convert: Any, reranker: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    bundle, _ = convert(reranker, weights="fp32")
    with outrider.Reranker(bundle.folder) as ranks:
        found = ranks.rerank("The sled?", TEXTS).ranked
    model = AutoModelForSequenceClassification.from_pretrained(reranker).eval()
    tokenizer = AutoTokenizer.from_pretrained(reranker)
    with torch.no_grad():
        logits = [model(**tokenizer("The sled?", text, return_tensors="pt")).logits.item() for text in TEXTS]
    expected = 1 / (1 + np.exp(-np.array(logits)))
    assert [each.index for each in found] == np.argsort(-expected).tolist()
    assert [each.score for each in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)


def test_weights_are_compressed(convert: Any, bert: Path) -> None:
    whole, small = (convert(bert, weights=weights)[0] for weights in ("fp32", None))
    assert small.manifest.main.weights == "int8"
    first, second = (outrider.Embedder(each.folder).embed(TEXTS).vectors for each in (whole, small))
    assert ((first * second).sum(1) > 0.99).all()


def test_kinds_and_lengths_are_found(tmp_path: Path) -> None:
    assert kind_of_text_encoder(locate(write_config(tmp_path))) == "embedding"
    write_config(tmp_path, architectures=["BertForSequenceClassification"], id2label={"0": "LABEL_0"})
    assert kind_of_text_encoder(locate(tmp_path)) == "rerank"
    write_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert kind_of_text_encoder(locate(tmp_path)) is None
    add_pooling(tmp_path, pooling_mode_lasttoken=True, pooling_mode_cls_token=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "do_lower_case": true}', "utf-8")
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts), "utf-8")
    assert kind_of_text_encoder(locate(tmp_path)) == "embedding"
    geometry, entry = describe(tmp_path, "embedding")
    assert (geometry.context_length, entry) == (48, TextEncoderEntry("embedding", "last_token", True, "q: "))
    add_pooling(tmp_path, pooling_mode_lasttoken=True, include_prompt=False)
    with pytest.raises(ExportError, match="leaves the prompt 'q: ' out of a text's embedding"):
        describe(tmp_path, "embedding")
    (tmp_path / "config_sentence_transformers.json").unlink()
    write_config(tmp_path, model_type="xlm-roberta", pad_token_id=1)
    (tmp_path / "sentence_bert_config.json").unlink()
    assert describe(tmp_path, "embedding")[0].context_length == 62


@pytest.mark.parametrize(("modes", "modules", "says"), [
    ({"pooling_mode_max_tokens": True}, (), "pools by max_tokens"),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "pools by"),
    ({"pooling_mode_mean_tokens": True}, ("Dense",), "has a module Dense"),
])  # fmt: skip
def test_what_the_pipeline_has_not_is_refused(
    tmp_path: Path, modes: dict[str, bool], modules: tuple[str, ...], says: str
) -> None:
    add_pooling(write_config(tmp_path), **modes)
    listed = [*MODULES, *({"type": f"sentence_transformers.models.{name}"} for name in modules)]
    (tmp_path / "modules.json").write_text(json.dumps(listed), "utf-8")
    with pytest.raises(ExportError, match=says):
        describe(tmp_path, "embedding")


def test_options_of_models_that_write_are_refused(tmp_path: Path) -> None:
    bert = write_config(tmp_path / "bert")
    reranker = write_config(tmp_path / "r", architectures=["BertForSequenceClassification"], num_labels=1)
    with pytest.raises(OptionError, match="draft='x' is for models that write, and bert is an embedding model"):
        export_bundle(bert, "x", output=tmp_path / "out")
    with pytest.raises(OptionError, match="format='onnx' is for models that write, and r is a reranker"):
        export_bundle(reranker, output=tmp_path / "out", format="onnx")
    write_config(reranker, architectures=["BertForSequenceClassification"], id2label={"0": "A", "1": "B"})
    with pytest.raises(ExportError, match="is a classifier of 2 labels"):
        export_bundle(reranker, output=tmp_path / "out")
