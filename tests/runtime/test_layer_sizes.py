"""Models whose layers differ in their heads, and of which some read others' keys and values, on OpenVINO."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import outrider
from outrider.bundle import Bundle
from toys import in_threads, load_toy, random_ids
from varied import SHAPES, WINDOW, save_varied

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
