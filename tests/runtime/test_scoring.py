"""`Engine.score` gives what the model gave when it wrote, and what a softmax gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from calls import rows_of_call
from outrider.engine.scoring import PIECE_TOKENS
from outrider.types import Chunk, Prompt

OPTIONS: dict[str, Any] = {"logprobs": 0, "logprobs_of": "unprocessed", "ignore_eos": True, "drafter": None}
PROMPT = [5, 9, 3, 7, 11]


def test_an_answer_has_the_probabilities_with_which_it_was_written(openvino_engine: outrider.Engine) -> None:
    for seed in range(3):
        for count in (1, 2, PIECE_TOKENS, PIECE_TOKENS + 1, PIECE_TOKENS + 2, 2 * PIECE_TOKENS + 3):
            written = openvino_engine.generate(PROMPT, temperature=1.5, seed=seed, max_new_tokens=count, **OPTIONS)
            found = openvino_engine.score(PROMPT, written.token_ids)
            assert len(found) == count
            assert found == [each.logprob for each in written.logprobs or ()]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_any_tokens_are_scored_as_by_a_softmax(openvino_engine: outrider.Engine, token_ids: list[int]) -> None:
    found = openvino_engine.score(Prompt(PROMPT), token_ids)
    main = openvino_engine.loaded["main"].backend
    whole = [*PROMPT, *token_ids]
    slot = main.open(len(whole))
    assert slot is not None
    rows = rows_of_call(main, Chunk(slot, whole, len(whole)))[len(PROMPT) - 1 : -1].astype(np.float64)
    slot.close()
    expected = rows[np.arange(len(token_ids)), token_ids] - np.log(np.exp(rows).sum(1))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_text_is_scored_after_a_prompt_of_text(tiny: Path) -> None:
    with outrider.load(tiny, drafter=None, cache_size=0.02) as engine:
        found = engine.score("Why is the sky blue?", "Because of the air.")
        assert len(found) == len(engine.tokenizer.encode("Because of the air."))
        assert max(found) < 0
        assert found == engine.score("Why is the sky blue?", engine.tokenizer.encode("Because of the air."))


def test_what_cannot_be_scored_is_said(openvino_engine: outrider.Engine) -> None:
    with pytest.raises(outrider.RequestError, match="has no tokens to score"):
        openvino_engine.score(PROMPT, "")
    with pytest.raises(outrider.RequestError, match="The answer has token id 99999; the vocabulary ends at"):
        openvino_engine.score(PROMPT, [3, 99_999])
    wrong: list[Any] = [None, 5, b"ab", [1.5], ["a"], [True], {1: 2}, [-1], np.zeros(2)]
    for answer in wrong:
        with pytest.raises(outrider.OptionError, match="answer=.* is neither a text nor token ids"):
            openvino_engine.score(PROMPT, answer)
    array: Any = np.array([3, 4])
    assert openvino_engine.score(PROMPT, array) == openvino_engine.score(PROMPT, (3, 4))
    with pytest.raises(outrider.RequestError, match="exceed the model's context"):
        openvino_engine.score(PROMPT, [3] * 100_000)
