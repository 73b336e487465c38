"""Prompt lookup against a plain scan of the context."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GenerationConfig
from outrider.drafters import Ngram
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import Greedy
from outrider.types import DraftRequest, Noise, TokenSequence

SAMPLER = LogitsSampler(GenerationConfig(), [])


def propose(drafter: Ngram, sequence: TokenSequence, limit: int, eos: frozenset[int] = frozenset()) -> list[int]:
    (draft,) = drafter.propose([DraftRequest(sequence, limit, SAMPLER, Greedy(), Noise(0), eos)])
    assert draft.probs is None
    return draft.token_ids


def by_scanning(context: list[int], max_ngram_size: int, limit: int) -> list[int]:
    for n in range(min(max_ngram_size, len(context) - 1), 0, -1):
        for end in range(len(context) - 1, n - 1, -1):
            if context[end - n : end] == context[-n:]:
                copied = list(context)
                for i in range(limit):
                    copied.append(copied[end + i])
                return copied[len(context) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    st.integers(1, 4),
    st.integers(0, 8),
)
def test_an_index_that_grows_finds_what_a_scan_finds(
    prompt: list[int], rounds: list[list[int]], max_ngram_size: int, limit: int
) -> None:
    drafter = Ngram(max_ngram_size)
    sequence = TokenSequence(list(prompt), len(prompt))
    drafter.reserve(sequence, 1000)
    assert propose(drafter, sequence, limit) == by_scanning(prompt, max_ngram_size, limit)
    for committed in rounds:
        sequence.token_ids.extend(committed)
        expected = by_scanning(sequence.token_ids, max_ngram_size, limit)
        assert propose(drafter, sequence, limit) == expected


def test_nothing_is_copied_after_an_end() -> None:
    drafter = Ngram()
    sequence = TokenSequence([1, 2, 9, 3, 1, 2], 6)
    drafter.reserve(sequence, 100)
    assert propose(drafter, sequence, 5, frozenset({9})) == [9]
