"""Models whose layers differ in their heads, and of which some read others' keys and values, on OpenVINO."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import outrider
from outrider.bundle import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import MODEL_NAMES, write_manifest
from outrider.testing import save_toy_bundle
from outrider.testing.tokenizer import TOY_ALPHABET
from outrider_export.direct.convert import describe_layers
from outrider_export.direct.describe import describe
from outrider_export.direct.graph import build
from outrider_export.direct.pack import matrices_of, pack
from outrider_export.direct.save import save
from outrider_export.direct.weights import Rows, StoredMatrix, Weights, layer_of
from toys import in_threads, load_toy, random_ids

# Toy models with Gemma 4's layers: heads of two sizes, keys that the last layers share, and inputs by layer.

SHAPES = ((1, 8), (1, 16), (0, 0), (0, 0))  # heads of keys and values, and their size, by layer
WINDOW = 8
_CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "final_logit_softcapping": 5.0, "max_position_embeddings": 512,
}  # fmt: skip


class RandomWeights(Weights):
    """Weights that are drawn by their names; with noise, those of another model, which often says the same."""

    def __init__(self, noise: float) -> None:
        super().__init__(describe(_CONFIG), interleaved=False)
        self._noise = noise

    def stored(self, name: str) -> StoredMatrix | None:
        """See `Weights`."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module == "lm_head" or module.endswith("sinks"):
            return None
        rows, columns = self._shape_of(module)
        shape: tuple[int, ...] = (rows or len(TOY_ALPHABET), columns)
        if "norm" in module.rsplit(".", 1)[-1] or module.endswith("output_scale"):
            sizes = {"q_norm": 0, "k_norm": 0, "per_layer_projection_norm": 8, "output_scale": 1}
            size = sizes.get(module.rsplit(".", 1)[-1], 32)
            i, _ = layer_of(module)
            shape = (size or self.decoder.layers[i or 0].sizes.head_size,)
        rng = np.random.default_rng([*name.encode()])
        values = rng.standard_normal(shape) * (0.1 if len(shape) == 1 else 0.3) + (1 if len(shape) == 1 else 0)
        values += self._noise * np.random.default_rng(1).standard_normal(shape)
        found: Rows = values.astype(np.float32)
        return StoredMatrix(shape, found.nbytes, lambda part: found[part])

    def missing(self, name: str) -> Any:
        """See `Weights`."""
        raise AssertionError(name)


def save_varied(folder: Path, draft_noise: float = 0.02) -> Bundle:
    """A toy bundle of a main and a draft model with such layers."""
    bundle = save_toy_bundle(folder, padded=False)
    for role, noise in (("main", 0.0), ("draft", draft_noise)):
        weights = RandomWeights(noise)
        path = folder / role / MODEL_NAMES["openvino"][0]
        path.with_suffix(".bin").unlink()
        packed = pack(weights, "fp32", path.with_suffix(".bin"), lambda _: None)
        assert len(packed) == len(matrices_of(weights))
        save(*build(weights.decoder, weights, packed), path)

    def changed(entry: Any) -> Any:
        sizes = {"num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "hidden_size": 32}
        layers = msgspec.convert(
            msgspec.to_builtins(entry.geometry) | describe_layers(weights.decoder) | sizes, type(entry.geometry)
        )
        return msgspec.structs.replace(entry, geometry=layers)

    manifest = bundle.manifest
    drafter = msgspec.structs.replace(manifest.drafters[0], model=changed(manifest.drafters[0].model))
    write_manifest(
        folder,
        msgspec.structs.replace(manifest, main=changed(manifest.main), drafters=(drafter,), files=list_files(folder)),
    )
    return read_bundle(folder)


OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 2}
EXACT: dict[str, Any] = {"precision": "f32", "cache_precision": "f32"}
NUMBERS = 2 * (8 + 16)  # of a token: keys and values of the first two layers, one head each


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_varied(tmp_path_factory.mktemp("varied") / "bundle")


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Iterator[outrider.Engine]:
    with load_toy(bundle, **EXACT) as made:
        yield made


def test_the_cache_has_each_layer_s_own_size(bundle: Bundle, engine: outrider.Engine) -> None:
    geometry, main = bundle.manifest.main.geometry, cast("Any", engine.main)
    assert geometry.kv_shapes == SHAPES
    assert geometry.num_cached_layers == main.num_layers == 2
    assert geometry.numbers_per_token == NUMBERS
    assert engine.cache["main"].bytes_per_token == main.bytes_per_token == 4 * NUMBERS
    assert geometry.sliding_windows == (WINDOW, 0, WINDOW, 0)


@pytest.mark.parametrize("draft", [{"drafter": "draft", "num_assistant_tokens": 3}, {"drafter": "suffix"}])
def test_drafts_change_no_bit(engine: outrider.Engine, draft: dict[str, Any]) -> None:
    """Behind prompts of other lengths, and after one that is in the cache."""
    prompts = [random_ids(1, 50), random_ids(1, 33) + random_ids(2, 9), random_ids(3, 5) * 6]
    plain = [engine.generate(each, drafter=None, **OPTIONS) for each in prompts]
    drafted = [engine.generate(each, **draft, **OPTIONS) for each in prompts]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert [each.logprobs for each in drafted] == [each.logprobs for each in plain]
    assert drafted[0].stats.num_cached_tokens == 49
    assert sum(each.stats.num_draft_tokens for each in drafted) > 0
    together: dict[int, Any] = {}
    in_threads(lambda i: together.update({i: engine.generate(prompts[i], **draft, **OPTIONS)}), range(3))
    assert [together[i].token_ids for i in range(3)] == [each.token_ids for each in plain]


def test_a_shared_layer_reads_what_its_layer_has_written(engine: outrider.Engine) -> None:
    """Read whole, in pieces, and one token a call, rows are the same up to single precision."""
    from outrider.models.tuning.measure.readings import read

    token_ids = random_ids(5, 60)
    whole = read(engine.main, token_ids, [60], 60)
    for pieces in ([31, 29], [60 - 40, *[1] * 40]):
        assert np.abs(read(engine.main, token_ids, pieces, 60) - whole).max() < 1e-4
