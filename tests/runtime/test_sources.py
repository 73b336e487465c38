"""Which tokens were drafted, by which drafter, and what became of the drafts."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from outrider.bundle import Bundle
from outrider.decoding.results import AnswerToken, tokens_of_round
from outrider.testing import ToyTokenizer
from outrider.types import Draft, Drafter, Outcome
from watching import chat_engine

LONG: dict[str, Any] = {"max_new_tokens": 120, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(openvino_bundle: Bundle) -> Iterator[outrider.Engine]:
    with chat_engine(openvino_bundle) as engine:
        yield engine


class Knowing(Drafter):
    """Proposes the answer that it knows, with a wrong token at every third place of the answer."""

    num_assistant_tokens = 4

    def __init__(self, prompt: int, answer: list[int]) -> None:
        self._begin, self._answer = prompt, answer

    def propose(self, requests: Any) -> list[Draft]:
        return [self._propose(len(r.sequence) - self._begin, r.limit) for r in requests]

    def _propose(self, at: int, limit: int) -> Draft:
        return Draft([self._wrong(i) if i % 3 == 0 else self._answer[i] for i in range(at, at + limit)])

    def _wrong(self, i: int) -> int:
        return (self._answer[i] + 1) % 39


def test_every_token_says_where_it_comes_from(engine: outrider.Engine) -> None:
    plain = engine.generate("hello", drafter=None, **LONG)
    assert {(token.source, token.drafter) for token in plain.tokens} == {("plain", None)}
    engine.add_drafter("knowing", Knowing(plain.stats.num_prompt_tokens, plain.token_ids))
    result = engine.generate("hello", drafter="knowing", num_assistant_tokens=2, **{**LONG, "max_new_tokens": 8})
    # Round 1: the prompt's token. 2: tokens 1, 2 and the bonus 3. 3: 4, 5 and the bonus 6. 4: the last is not drafted.
    sources = ["plain", "accepted", "accepted", "bonus", "accepted", "accepted", "bonus", "plain"]
    drafters = [None if source == "plain" else "knowing" for source in sources]
    assert result.tokens == [*map(AnswerToken, plain.token_ids[:8], sources, drafters)]  # type: ignore[arg-type]
    result = engine.generate("hello", drafter="knowing", num_assistant_tokens=4, **{**LONG, "max_new_tokens": 8})
    sources = ["plain", "accepted", "accepted", "recovered", "accepted", "accepted", "recovered", "plain"]
    assert [token.source for token in result.tokens] == sources


@pytest.mark.parametrize("drafter", ["auto", "draft", "suffix", "ngram"])
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.7, "seed": 1, "sampling": "rejection"}])
def test_sources_agree_with_the_statistics(engine: outrider.Engine, drafter: str, sampled: dict[str, Any]) -> None:
    chunks = [*engine.stream("the same the same the same", drafter=drafter, **LONG, **sampled)]
    result = chunks[-1].result
    assert result
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert tokens == result.tokens
    assert [token.token_id for token in tokens] == result.token_ids
    assert sum(token.source == "accepted" for token in tokens) == result.stats.num_accepted_tokens
    drafted = {token.drafter for token in tokens if token.source != "plain"}
    assert drafted <= ({"draft", "suffix"} if drafter == "auto" else {drafter})
    assert drafted or not result.stats.num_drafts
    assert result.as_dict()["tokens"][0] == {"token_id": result.token_ids[0], "source": "plain", "drafter": None}


@given(st.lists(st.text("aeos t", min_size=1, max_size=3), min_size=1, max_size=3, unique=True), st.integers(0, 30))
def test_stop_strings_never_leak_and_neither_do_their_tokens(
    engine: outrider.Engine, stop: Sequence[str], seed: int
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.5, "seed": seed}
    chunks = [*engine.stream("the same", stop=stop, **options)]
    result = chunks[-1].result
    assert result
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert not any(each in result.text for each in stop)
    assert [token for chunk in chunks for token in chunk.tokens] == result.tokens
    assert [token.token_id for token in result.tokens] == result.token_ids
    decode, given_out, token_ids = ToyTokenizer().decode, "", list[int]()
    for chunk in chunks:
        given_out += chunk.text
        token_ids += [token.token_id for token in chunk.tokens]
        assert decode(token_ids) == given_out
    whole = engine.generate("the same", **options).text
    assert whole.startswith(result.text)


def test_sources_in_trees() -> None:
    """1, or 2 with 3 or 4 after it."""
    tree = Draft([1, 2, 3, 4], parents=[-1, -1, 1, 1])
    ends: list[tuple[list[int], str]] = [([], "recovered"), ([0], "bonus"), ([1], "recovered"), ([1, 3], "bonus")]
    for path, last in ends:
        token_ids = [*(tree.token_ids[i] for i in path), 9]
        tokens = tokens_of_round(token_ids, tree, Outcome(path, 9), "draft")
        assert [token.source for token in tokens] == ["accepted"] * len(path) + [last]
        assert tokens_of_round(token_ids[:1], tree, Outcome(path, 9), "draft") == tokens[:1]
