"""The suffix drafter and its indexes against plain scans."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GenerationConfig
from outrider.drafters import References, Suffix
from outrider.drafters.suffix import MOST_INDEXED, NextTokens
from outrider.drafters.suffix_automaton import Followers, SuffixAutomaton
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import Coupled, Greedy
from outrider.types import Committed, Draft, DraftRequest, Noise, TokenSequence, Verifier
from virtual_time import World

SAMPLER = LogitsSampler(GenerationConfig(), [])

texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=30))
documents = st.lists(st.lists(st.integers(0, 2), max_size=25), max_size=5)


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token_id in text:
        automaton.append(token_id)
    return automaton


def by_counting(following: list[int]) -> Followers:
    """The most frequent of these, the latest among equals."""
    counts = Counter(following)
    latest = {token_id: i for i, token_id in enumerate(following)}
    token_id = max(counts, key=lambda token_id: (counts[token_id], latest[token_id]))
    return Followers(token_id, counts[token_id], len(following), len(counts))


def ends_of(part: list[int], text: list[int]) -> list[int]:
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest_end(context: list[int], text: list[int]) -> int:
    return next(n for n in range(len(context), -1, -1) if ends_of(context[len(context) - n :], text))


@given(texts)
def test_an_automaton_that_grows_finds_what_a_scan_finds(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    assert automaton.longest.length == 0
    for num_tokens, token_id in enumerate(text, 1):
        automaton.append(token_id)
        so_far = text[:num_tokens]
        place = automaton.longest
        assert place.length == longest_end(so_far, so_far[:-1])
        # At the longest end that stood before, and at all shorter ones that stood elsewhere, too.
        while place.length:
            part = so_far[num_tokens - place.length :]
            ends = ends_of(part, so_far)
            assert automaton.latest(place) == ends[-1] == num_tokens
            following = [so_far[end] for end in ends[:-1]]
            assert automaton.followers(place) == by_counting(following)
            for token_id in set(following):
                assert automaton.followers(place, token_id).times == following.count(token_id)
            shorter = automaton.shorter(place)
            longer_than_that = so_far[num_tokens - shorter.length - 1 :]
            assert shorter.length < place.length
            assert ends_of(longer_than_that, so_far) == ends
            place = shorter


def test_a_text_that_repeats_itself_without_end_costs_no_more() -> None:
    automaton = automaton_of([7] * 3000)
    assert automaton.longest.length == 2999
    assert automaton.followers(automaton.longest).token_id == 7
    assert len(automaton._next) == 3001


@given(documents, st.lists(st.integers(0, 2), max_size=20))
def test_references_find_what_a_scan_finds(documents: list[list[int]], context: list[int]) -> None:
    references = References(documents)
    assert references.num_tokens == sum(map(len, documents))

    def by_scanning(context: list[int], longest: int) -> tuple[int, list[int]]:
        for n in range(min(longest, len(context)), 0, -1):
            part = context[len(context) - n :]
            if following := [d[end] for d in documents for end in ends_of(part, d[:-1])]:
                return n, following
        return 0, []

    length, following = by_scanning(context, 16)
    match = references.find(context)
    if match is None:
        assert length == 0
        return
    assert match.length == length
    assert references.followers(match) == by_counting(following)
    for token_id in range(3):
        extended = references.extend(match, token_id)
        longer, following = by_scanning([*context, token_id], length + 1)
        assert (extended is not None) == (longer == length + 1)
        if extended:
            assert extended.length == longer
            assert references.followers(extended) == by_counting(following)


def test_a_frequent_token_is_looked_up_in_a_sample_of_places() -> None:
    references = References([[1, 2] * 2000])
    match = references.find([0, 1])
    assert match is not None
    assert 64 <= len(match.positions) <= 128
    assert references.followers(match).token_id == 2


def propose(drafter: Suffix, sequence: TokenSequence, limit: int, eos: frozenset[int] = frozenset()) -> Draft:
    (draft,) = drafter.propose([DraftRequest(sequence, limit, SAMPLER, Greedy(), Noise(0), eos)])
    assert draft.probs is None
    return draft


def draft_of(
    context: list[int],
    limit: int,
    drafter: Suffix | None = None,
    eos: frozenset[int] = frozenset(),
    num_prompt_tokens: int | None = None,
) -> Draft:
    drafter = drafter or Suffix()
    sequence = TokenSequence(context, len(context) if num_prompt_tokens is None else num_prompt_tokens)
    drafter.reserve(sequence, 1000)
    return propose(drafter, sequence, limit, eos)


def test_a_long_context_is_indexed_in_pieces() -> None:
    """All answers of a round wait for it. Nothing is copied before the index is whole, and then as by a new one."""
    context = [*range(64)] * (3 * MOST_INDEXED // 64) + [7, 8]
    drafter, sequences = Suffix(), [TokenSequence([*context], len(context)) for _ in range(2)]
    for sequence in sequences:
        drafter.reserve(sequence, 10_000)
    requests = [DraftRequest(sequence, 4, SAMPLER, Greedy(), Noise(0), frozenset()) for sequence in sequences]
    before, num_calls = 0, 0
    while before < 2 * len(context):
        drafts = drafter.propose(requests)
        indexed = [drafter._indexes[sequence].num_tokens for sequence in sequences]
        assert 0 < sum(indexed) - before <= MOST_INDEXED + 64
        for draft, count in zip(drafts, indexed, strict=True):
            assert draft.token_ids == ([9, 10, 11, 12] if count == len(context) else [])
        before, num_calls = sum(indexed), num_calls + 1
    assert num_calls > 5


def test_a_prompt_is_indexed_as_it_is_read() -> None:
    context = [*range(64)] * (3 * MOST_INDEXED // 64) + [7, 8]
    drafter, sequence = Suffix(), TokenSequence(context, len(context))
    drafter.reserve(sequence, 10_000)
    for begin in range(0, len(context), 512):
        drafter.observe(sequence, Committed(context[begin : begin + 512], []))
    assert propose(drafter, sequence, 4).token_ids == [9, 10, 11, 12]


@given(texts, st.lists(texts, max_size=5), documents, st.integers(0, 12), st.sampled_from([0.0, 0.02, 0.5]))
def test_drafts_keep_to_their_rules(
    prompt: list[int], rounds: list[list[int]], documents: list[list[int]], limit: int, min_chance: float
) -> None:
    """A grown index drafts the same as a new one."""
    references = [References(documents)]
    drafter = Suffix(references, min_chance)
    sequence = TokenSequence(list(prompt), len(prompt))
    drafter.reserve(sequence, 1000)
    for committed in [[], *rounds]:
        sequence.token_ids += committed
        draft = propose(drafter, sequence, limit, frozenset({2}))
        new = Suffix(references, min_chance)
        assert draft == draft_of(list(sequence.token_ids), limit, new, frozenset({2}), len(prompt))
        assert draft.confidences is not None
        assert len(draft.token_ids) == len(draft.confidences) <= limit
        assert 2 not in draft.token_ids[:-1]
        all_kept = 1.0
        for confidence in draft.confidences:
            assert 0 < confidence <= 0.95
            all_kept *= confidence
        assert all_kept > min_chance or not draft.token_ids
    drafter.release(sequence)
    drafter.release(sequence)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_repetition_is_drafted_at_full_length_and_ever_surer(period: int) -> None:
    draft = draft_of([99, *range(period), *range(period)], 16)
    assert draft.token_ids == [i % period for i in range(16)]
    assert draft.confidences == sorted(draft.confidences or [])


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 3)), max_size=40))
def test_the_latest_token_after_the_longest_known_context_is_guessed(said: list[tuple[list[int], int]]) -> None:
    table, known = NextTokens(), dict[tuple[int, ...], list[int]]()
    for context, token_id in said:
        table.add(context, token_id)
        for length in range(1, min(len(context), 3) + 1):
            known.setdefault(tuple(context[-length:]), []).append(token_id)
    for context, _ in said:
        ends = [tuple(context[-length:]) for length in range(min(len(context), 3), 0, -1)]
        end = next((end for end in ends if end in known), None)
        if end is None:
            assert table.guess(context) == (0, 0.0)
            continue
        *_, latest = following = known[end]
        times = next((i for i, token_id in enumerate(reversed(following)) if token_id != latest), len(following))
        token_id, chance = table.guess(context)
        assert token_id == latest
        assert chance == pytest.approx(times / (times + 12 / len(end)))


def test_contexts_in_the_same_place_are_told_apart_and_the_newer_one_stays() -> None:
    table, num_places = NextTokens(), 1 << 16
    assert table.guess([]) == table.guess([1]) == (0, 0.0)
    other = next(i for i in range(2, 1 << 22) if (hash((i,)) - hash((1,))) % num_places == 0)
    table.add([], 5)
    table.add([1], 5)
    assert table.guess([1])[0] == 5
    assert table.guess([other]) == (0, 0.0)
    table.add([other], 5)
    assert table.guess([other])[0] == 5
    assert table.guess([1]) == (0, 0.0)


def test_what_an_answer_said_is_proposed_in_the_next_one_and_what_a_prompt_said_is_not() -> None:
    drafter = Suffix(min_chance=0)
    first = TokenSequence([1, 2, 3], 2)  # 3 is the answer's
    drafter.reserve(first, 100)
    propose(drafter, first, 5)
    first.token_ids += [4, 5]  # the end of an answer has no proposal after it
    drafter.release(first)
    draft = draft_of([8, 2], 5, drafter)
    assert draft.token_ids == [3, 4, 5]
    assert draft.confidences == pytest.approx([1 / 13, 1 / 7, 1 / 5])
    assert draft_of([8, 1], 5, drafter).token_ids == []
    # Where the context itself goes on, it is copied; where the copy cannot go on, what was said follows.
    assert draft_of([2, 6, 9, 2], 1, drafter).token_ids == [6]
    assert draft_of([8, 2], 1, Suffix(min_chance=0)).token_ids == []


def test_a_request_without_earlier_answers_takes_nothing_from_them_and_leaves_nothing() -> None:
    drafter = Suffix(min_chance=0)
    for said, earlier_answers in ((4, False), (5, True), (6, False)):
        sequence = TokenSequence([1, 2], 2, earlier_answers=earlier_answers)
        drafter.reserve(sequence, 100)
        assert propose(drafter, sequence, 1).token_ids == []
        sequence.token_ids += [said, 2]
        assert propose(drafter, sequence, 1).token_ids == [said]  # what it has said itself, it copies
        drafter.release(sequence)
    assert draft_of([8, 2], 1, drafter).token_ids == [5]


@pytest.mark.parametrize(("verifier", "options"), [(Greedy(), {}), (Coupled(), {"temperature": 1.0, "seed": 3})])
def test_answers_are_those_of_plain_decoding_whatever_earlier_ones_said(
    verifier: Verifier, options: dict[str, Any]
) -> None:
    world = World(copies=Suffix(), model=False, periods=[(0, -9)])
    num_accepted = 0
    for prompt in ([1, 2, 3], [3, 2], [1, 2, 3], [5, 1, 2, 3]):
        plain, _, _ = world.decode(prompt, drafted=False, num=60, verifier=verifier, **options)
        drafted, _, request = world.decode(prompt, num=60, verifier=verifier, **options)
        assert drafted == plain
        num_accepted += request.stats.num_accepted_tokens
    assert num_accepted


def test_a_draft_is_cut_with_its_confidences() -> None:
    assert Draft([1, 2, 3], confidences=[0.5, 0.4, 0.3]).cut(2) == Draft([1, 2], confidences=[0.5, 0.4])
    assert Draft([1, 2, 3]).cut(2) == Draft([1, 2])
    assert Draft([1], probs=[], confidences=[]).cut(0) == Draft([], probs=[], confidences=[])
