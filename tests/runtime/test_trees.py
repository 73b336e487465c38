"""Drafts with several candidates: exact for every verifier that takes them.

For rejection sampling to 1e-12: each accept test is followed both ways, with its probability. For the others token by
token against plain decoding.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_laws import Law, Models, output_law, plain_law, tokens_before
from enumeration import largest_difference
from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.decoding.reading import verify
from outrider.errors import DrafterError, NoTokenLeft
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import BlockRejection, Coupled, Greedy, TokenRejection
from outrider.types import NO_DRAFT, Distribution, Draft, ListedLogits, LogitsRow, Noise
from outrider_bench.verify.exact import chi_square_p_value

# For each token the one that it follows. The last two are not in order of depth.
SHAPES = [
    [-1, -1], [-1, -1, -1], [-1, 0, 1], [-1, -1, 0, 0, 1, 1], [-1, 0, 0, 1, 1, 2], [-1, 0, -1, 1, 2, 0],
    [-1, 0, 1, 0, -1, 4],
]  # fmt: skip
MATCHING = [Greedy(), Coupled()]
REJECTION = [TokenRejection(), BlockRejection()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 2},
    {"repetition_penalty": 1.5, "presence_penalty": 0.7},
    {"no_repeat_ngram_size": 1},  # answers end for want of a token
    {"no_repeat_ngram_size": 2, "temperature": 0.5},
]
models = st.builds(
    Models,
    st.integers(0, 2**31),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.just(3),
    st.sampled_from(OPTIONS),
    st.sampled_from([0.0, 0.25]),
)


# Rejection sampling, in closed form


@settings(max_examples=60)
@given(models, st.sampled_from(SHAPES), st.sampled_from(REJECTION), st.booleans())
def test_rejection_gives_the_main_models_joint_distribution(
    models: Models, shape: list[int], verifier: Any, certain: bool
) -> None:
    """Miao et al. 2024, theorem on multi-step speculative sampling; also where the options leave no token."""
    length = max(Draft(shape, parents=shape).depths) + 2
    law, _ = output_law(verifier, models, shape, certain, length)
    assert largest_difference(law, plain_law(models, length)) < 1e-12


def grown(verifier: Any, models: Models, shape: list[int], noise: Noise, position: int = 0) -> Draft:
    """A tree as a draft model draws it: all children of a token at once."""
    nodes: dict[int, tuple[int, Any, int]] = {}
    draft = NO_DRAFT
    for parent in dict.fromkeys(shape):
        if parent >= 0 and parent not in nodes:
            continue
        row = [*nodes].index(parent) + 1 if parent >= 0 else 0
        rows, children = models.rows_of(draft, 1), [i for i, each in enumerate(shape) if each == parent]
        drawn = verifier.draw_several(rows, row, noise, position, len(children))
        nodes |= {i: (token_id, probs, row - 1) for i, (token_id, probs) in zip(children, drawn, strict=False)}
        token_ids, probs, parents = (list(each) for each in zip(*nodes.values(), strict=True))
        draft = Draft(token_ids, probs if probs[0] else None, parents=parents)
    return draft


# Equality


@dataclass
class Planned:
    """A tree whose tokens follow the plain answer where they may, or are any."""

    parents: list[int]
    right: list[bool]
    others: list[list[int]]

    def draft(self, answer: Sequence[int]) -> Draft:
        token_ids: list[int] = []
        for i, depth in enumerate(Draft(self.parents, parents=self.parents).depths):
            siblings = [token_ids[k] for k in range(i) if self.parents[k] == self.parents[i]]
            use = self.right[i] and depth < len(answer) and answer[depth] not in siblings
            token_ids.append(answer[depth] if use else next(x for x in self.others[i] if x not in siblings))
        return Draft(token_ids, parents=self.parents)


@st.composite
def plans(draw: st.DrawFn) -> Planned:
    size = draw(st.integers(0, 7))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    right, others = st.booleans(), st.permutations(range(8))  # some that the model does not even have
    return Planned(parents, [draw(right) for _ in range(size)], [draw(others) for _ in range(size)])


def finish(request: Answer, models: Models, plans: Sequence[Planned], answer: Sequence[int] = ()) -> Any:
    """All of an answer that must not depend on drafts, with these trees in its rounds, then none."""
    drafts = iter(plans)
    error = None
    while not request.ended:
        token_ids = request.sequence.token_ids
        plan = next(drafts, None)
        draft = plan.draft(answer[len(token_ids) :]) if plan else NO_DRAFT
        rows = models.rows_of(draft, context=token_ids, sampler=request.sampler)
        try:
            outcome = verify(request, draft, rows)
        except NoTokenLeft:
            error = len(token_ids)
            break
        begin = len(token_ids)
        request.commit(rows, outcome)
        if plan:
            follows = [
                tokens_before(draft, i) == tuple(answer[begin : begin + len(tokens_before(draft, i))])
                for i in range(len(draft) + 1)
            ]
            longest = max(len(tokens_before(draft, i)) for i, so in enumerate(follows) if so)
            assert len(token_ids) - begin == min(longest + 1, len(answer) - begin)
    return request.sequence.token_ids, request.finish_reason, request.logprobs, error


@settings(max_examples=300)
@given(
    models,
    st.sampled_from(MATCHING),
    st.lists(plans(), min_size=1, max_size=4),
    st.sampled_from(["processed", "unprocessed"]),
    st.booleans(),
)
def test_trees_do_not_show(models: Models, verifier: Any, plans: list[Planned], kind: str, ends: bool) -> None:
    """The text is that of plain decoding, to the bit of a logprob, and no token that was there is missed."""
    temperature = {"temperature": 0.0} if isinstance(verifier, Greedy) and not isinstance(verifier, Coupled) else {}
    asked = {"logprobs": 2, "logprobs_of": kind}
    models = replace(models, options=models.options | temperature | asked)
    eos = frozenset({2} if ends else ())
    plain, drafted = (models.request(verifier, 3, eos_token_ids=eos, logprobs=[]) for _ in range(2))
    answer = finish(plain, models, [])
    assert finish(drafted, models, plans, answer[0]) == answer
    stats = drafted.stats
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_position) <= stats.num_draft_tokens
    assert stats.num_generated_tokens == len(answer[0])


chains = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=100)
@given(models, st.sampled_from([*MATCHING, *REJECTION]), chains, st.integers(0, 2**31))
def test_a_tree_that_is_a_chain_is_judged_as_a_chain(
    models: Models, verifier: Any, token_ids: list[int], seed: int
) -> None:
    chain = Draft(token_ids)
    tree = replace(chain, parents=[*range(-1, len(token_ids) - 1)])
    made: list[Any] = []
    for draft in (chain, tree):
        try:
            made.append(verify(models.request(verifier, seed), draft, models.rows_of(draft)))
        except NoTokenLeft as error:
            made.append(error.row)
    assert made[0] == made[1]


# Drawing


@given(models, st.sampled_from([*MATCHING, *REJECTION]), st.integers(1, 5), st.integers(0, 9), st.integers(0, 2**31))
def test_the_first_of_several_is_the_one_that_is_drawn_alone(
    models: Models, verifier: Any, count: int, position: int, seed: int
) -> None:
    draft = Draft([1, 0, 2], parents=[-1, 0, -1])
    for row in range(4):
        rows, noise = models.rows_of(draft), Noise(seed)
        left = models.distribution(0, tokens_before(draft, row))
        if left is None:
            with pytest.raises(NoTokenLeft) as error:
                verifier.draw_several(rows, row, noise, position, count)
            assert error.value.row == row
            continue
        drawn = list(verifier.draw_several(rows, row, noise, position, count))
        assert drawn[0] == verifier.draw(rows, row, noise, position)
        token_ids = [token_id for token_id, _ in drawn]
        assert len(set(token_ids)) == len(token_ids)
        if not isinstance(verifier, Greedy):
            assert len(token_ids) == min(count, len(left.token_ids))
            for token_id, probs in drawn:
                assert probs.token_ids.tolist() == left.token_ids.tolist()
                np.testing.assert_allclose(probs.probs, left.probs, rtol=1e-12)
                left = Distribution(left.token_ids, left.probs).without(token_id) if count > 1 else left
        else:
            assert [probs for _, probs in drawn] == [None] * len(drawn)


def test_siblings_have_random_numbers_of_their_own() -> None:
    """No two draws or tests of a round share one."""
    used: list[float] = []

    @dataclass(frozen=True)
    class Recording(Noise):
        def uniforms(self, position: int, purpose: str, count: int) -> np.ndarray:
            made = super().uniforms(position, purpose, count)
            used.extend(made.tolist() if purpose == "accept" else made[-1:].tolist())
            return made

    models, noise = Models(1, 0.3, vocab_size=9), Recording(1)
    draft = grown(TokenRejection(), models, SHAPES[3], noise)
    TokenRejection().verify(draft, models.rows_of(draft), noise, 0)
    assert len(used) == 2 * len(draft) + 1 == len(set(used))


@pytest.mark.parametrize("verifier", [Coupled(), TokenRejection()], ids=str)
def test_several_are_drawn_without_replacement(verifier: Any) -> None:
    """The first two of four tokens have the probabilities p(a) · p(b) / (1 − p(a)). False alarm 1e-4, seeds fixed."""
    models = Models(8, vocab_size=4)
    row = models.distribution(0, ())
    assert row
    p = dict(zip(row.token_ids.tolist(), row.probs.tolist(), strict=True))
    assert len(p) > 2
    exact: Law = {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in itertools.permutations(p, 2)}
    counts: dict[tuple[int, ...], int] = {}
    rows = models.rows_of(NO_DRAFT)
    for seed in range(3000):
        pair = tuple(token_id for token_id, _ in verifier.draw_several(rows, 0, Noise(seed), 0, 2))
        counts[pair] = counts.get(pair, 0) + 1
    assert chi_square_p_value(counts, exact) > 1e-4


@given(
    st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0]), min_size=4, max_size=12),
    st.integers(1, 14),
    st.sampled_from([{}, {"banned_token_ids": [0, 2]}, {"logit_bias": {1: 1.0}}]),
)
def test_the_best_tokens_in_order(values: list[float], count: int, options: dict[str, Any]) -> None:
    """With the finite logits listed or not; the lower id first among equals."""
    logits = np.array([*values, 0.25], dtype=np.float32)
    sampler = LogitsSampler(GenerationConfig(**options), [])
    processed = logits.copy()
    processed[list(options.get("banned_token_ids", ()))] = -np.inf
    for token_id, bias in options.get("logit_bias", {}).items():
        processed[token_id] += bias
    order = sorted((i for i in range(len(logits)) if processed[i] > -np.inf), key=lambda i: (-processed[i], i))
    whole = LogitsRow.of(logits)
    finite = np.flatnonzero(logits > -np.inf)
    listed = ListedLogits(finite, logits[finite])
    for row in (whole, LogitsRow(whole.full, listed)):
        assert sampler.best_several(row, [], count) == order[:count]
        assert sampler.best_several(row, [], 1) == [sampler.best(row, [])]


# The shape of a draft


@pytest.mark.parametrize(("parents", "message"), [
    ([-1], "A draft of 2 tokens has 1 parents. Give one for each token"),
    ([0, -1], r"parents=\[0, -1\], where token 0 follows token 0. Let each token follow one before it"),
    ([-1, 2], "where token 1 follows token 2"),
    ([-2, 0], "where token 0 follows token -2"),
])  # fmt: skip
def test_what_is_no_tree_is_refused(parents: list[int], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        Draft([1, 2], parents=parents)


def test_candidates_past_the_answers_end_are_not_counted() -> None:
    models = Models(4, vocab_size=5, options={"temperature": 0.0})
    answer = finish(models.request(Greedy()), models, [])[0]
    request = models.request(Greedy(), eos_token_ids=frozenset(answer[2:3]))
    assert answer[2] not in answer[:2]
    # The first round's token is the prompt's. In the second, the answer ends with the second token of the path.
    for draft in (NO_DRAFT, Draft([*answer[1:4], 6, 7], parents=[-1, 0, 1, -1, 1])):
        rows = models.rows_of(draft, context=request.sequence.token_ids, sampler=request.sampler)
        request.commit(rows, verify(request, draft, rows))
    assert request.sequence.token_ids == answer[:3]
    assert request.stats.num_draft_tokens_per_round == [3]
    assert request.stats.num_accepted_tokens_per_round == [2]
    assert request.stats.num_accepted_tokens_per_position == [1, 1]
