"""The verifiers' output distributions, to 1e-12. They are found by bisecting the uniform numbers of `verify`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from outrider.config import LOSSY, SAMPLING, GenerationConfig
from outrider.decoding.reading import verify
from outrider.decoding.request import Request
from outrider.errors import NoTokenLeft, RequestError
from outrider.inputs.text import TextStream
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import SAMPLING_VERIFIERS, BlockRejection, Threshold, TokenRejection, Typical
from outrider.types import Distribution, Draft, Noise, Outcome, Sequence

pytestmark = pytest.mark.any_format

VOCAB_SIZE, LONGEST = 3, 3
Law = dict[tuple[int, ...], float]


@dataclass
class TwoModels:
    """Target and draft distributions that depend on all tokens before. Drafts end after some prefixes.

    sharpness: from nearly uniform to nearly certain; some tokens have probability 0.
    """

    seed: int
    sharpness: float
    certain: bool = False  # drafts are chosen without noise
    cache: dict[Any, Any] = field(default_factory=dict)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def distribution(self, role: int, prefix: tuple[int, ...]) -> Distribution:
        if (role, prefix) not in self.cache:
            rng = self._rng(role, len(prefix), *prefix)
            probs = np.exp(self.sharpness * rng.normal(size=VOCAB_SIZE))
            probs *= rng.random(VOCAB_SIZE) > 0.15
            probs[0] += 1e-3 * (not probs.any())
            token_ids = np.flatnonzero(probs)
            self.cache[role, prefix] = Distribution(token_ids, probs[token_ids] / probs.sum())
        made: Distribution = self.cache[role, prefix]
        return made

    def target(self, prefix: tuple[int, ...]) -> Distribution:
        return self.distribution(0, prefix)

    def drafts(self, prefix: tuple[int, ...] = (), probability: float = 1.0) -> list[tuple[float, tuple[int, ...]]]:
        """Every draft with its probability. Whether it ends is decided before its next token is drawn."""
        if len(prefix) == LONGEST or (prefix and self._rng(2, len(prefix), *prefix).random() < 0.25):
            return [(probability, prefix)]
        if self.certain:
            return self.drafts((*prefix, int(self._rng(3, len(prefix), *prefix).integers(VOCAB_SIZE))), probability)
        row = self.distribution(1, prefix)
        pairs = zip(row.token_ids.tolist(), row.probs.tolist(), strict=True)
        return list(itertools.chain.from_iterable(self.drafts((*prefix, x), probability * p) for x, p in pairs))

    def draft(self, token_ids: tuple[int, ...]) -> Draft:
        probs = [self.distribution(1, token_ids[:i]) for i in range(len(token_ids))]
        return Draft(list(token_ids), None if self.certain else probs)


@dataclass
class PrefixRows:
    """The main model's rows along one draft."""

    models: TwoModels
    token_ids: tuple[int, ...]

    def best(self, i: int) -> int:
        raise AssertionError("sampling does not ask for the best token")

    def distribution(self, i: int) -> Distribution:
        return self.models.target(self.token_ids[:i])


@dataclass(frozen=True)
class SetNoise(Noise):
    """Noise that is given: for every accept test, and for the token that is drawn at the end."""

    accept: tuple[float, ...] = ()
    last: float = 0.0

    def uniforms(self, position: int, purpose: str, count: int) -> np.ndarray:
        return np.array(self.accept[:count]) if purpose == "accept" else np.full(count, self.last)


def bisect(passes: Callable[[float], bool]) -> float:
    """The number in [0, 1] up to which `passes` holds."""
    low, high = 0.0, 1.0
    for _ in range(54):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return (low + high) / 2


def law_of(verifier: Any, draft: Draft, rows: Any) -> dict[tuple[int, int], float]:
    """The probability of every (num_accepted, next_token_id), given the draft."""
    never, always = 1 - 2.0**-53, 0.0
    size = len(draft)

    def verify(accept: list[float], last: float) -> Outcome:
        made: Outcome = verifier.verify(draft, rows, SetNoise(0, accept=tuple(accept), last=last), 0)
        return made

    by_token = not (isinstance(verifier, BlockRejection) and draft.probs)
    tests = []
    for i in range(size):
        before = [always if by_token else never] * i

        def passes(u: float, before: list[float] = before, i: int = i) -> bool:
            return verify([*before, u, *[never] * (size - i - 1)], 0.5).num_accepted > i

        tests.append(bisect(passes))
    if by_token:  # the first failure ends it
        reached = np.cumprod([1.0, *tests])
        counts = [reached[n] * (1 - tests[n]) if n < size else reached[n] for n in range(size + 1)]
    else:  # the last success counts
        behind = np.cumprod([1.0, *(1 - t for t in reversed(tests))])[::-1]
        counts = [behind[n] * (tests[n - 1] if n else 1.0) for n in range(size + 1)]
    law = {}
    for n, probability in enumerate(counts):
        if probability < 1e-15:
            continue
        accept = [always] * n + [never] * (size - n) if by_token else [never] * size
        if n and not by_token:
            accept[n - 1] = always
        below = 0.0
        for token_id in range(VOCAB_SIZE):

            def is_below(u: float, accept: list[float] = accept, token_id: int = token_id) -> bool:
                return verify(accept, u).next_token_id <= token_id

            upto = 1.0 if token_id == VOCAB_SIZE - 1 else bisect(is_below)
            law[n, token_id] = probability * (upto - below)
            below = upto
    return law


def output_law(verifier: Any, models: TwoModels) -> tuple[Law, float]:
    """The joint law of LONGEST + 1 tokens after one round and plain sampling, and the accepted tokens on average."""
    law: Law = {}
    accepted = 0.0
    for probability, token_ids in models.drafts():
        made = law_of(verifier, models.draft(token_ids), PrefixRows(models, token_ids))
        for (num_accepted, next_token_id), p in made.items():
            accepted += probability * p * num_accepted
            start = (*token_ids[:num_accepted], next_token_id)
            for end, rest in plain_law(models, start).items():
                law[end] = law.get(end, 0.0) + probability * p * rest
    return law, accepted


def plain_law(models: TwoModels, start: tuple[int, ...] = ()) -> Law:
    if len(start) == LONGEST + 1:
        return {start: 1.0}
    row = models.target(start)
    law: Law = {}
    for token_id, p in zip(row.token_ids.tolist(), row.probs.tolist(), strict=True):
        law |= {end: p * rest for end, rest in plain_law(models, (*start, token_id)).items()}
    return law


def largest_difference(a: Law, b: Law) -> float:
    return max(abs(a.get(cell, 0.0) - b.get(cell, 0.0)) for cell in {*a, *b})


MODELS = st.builds(TwoModels, st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 3.0]), st.booleans())


@settings(max_examples=25)
@given(MODELS)
def test_rejection_sampling_gives_the_main_models_joint_distribution(models: TwoModels) -> None:
    """Sun et al. 2024, theorem 1, for drafts that may end anywhere; and theorem 2: no fewer tokens are accepted."""
    plain = plain_law(models)
    by_token, kept_by_token = output_law(TokenRejection(), models)
    by_block, kept_by_block = output_law(BlockRejection(), models)
    assert largest_difference(by_token, plain) < 1e-12
    assert largest_difference(by_block, plain) < 1e-12
    assert kept_by_block > kept_by_token - 1e-12


def test_block_verification_keeps_more_tokens() -> None:
    """The example of Sun et al. 2024, section 2: target [1/3, 2/3], draft [2/3, 1/3], two tokens: 10/9 against 11/9."""

    class Constant(TwoModels):
        def distribution(self, role: int, prefix: tuple[int, ...]) -> Distribution:
            return Distribution(np.arange(2), np.array([[1, 2], [2, 1]][role]) / 3)

        def drafts(self, prefix: tuple[int, ...] = (), probability: float = 1.0) -> Any:
            row = self.distribution(1, ()).probs
            return [(row[a] * row[b], (a, b)) for a in range(2) for b in range(2)]

    assert output_law(TokenRejection(), Constant(0, 0))[1] == pytest.approx(10 / 9, abs=1e-12)
    assert output_law(BlockRejection(), Constant(0, 0))[1] == pytest.approx(11 / 9, abs=1e-12)


def one_token_law(verifier: Any, models: TwoModels) -> np.ndarray:
    """The law float64 [VOCAB_SIZE] of the first token of a round with a draft of one token."""
    row = models.distribution(1, ())
    law = np.zeros(VOCAB_SIZE)
    for x, p in zip(row.token_ids.tolist(), row.probs.tolist(), strict=True):
        for (num_accepted, next_token_id), q in law_of(verifier, models.draft((x,)), PrefixRows(models, (x,))).items():
            law[x if num_accepted else next_token_id] += p * q
    return law


def dense(row: Distribution) -> np.ndarray:
    probs = np.zeros(VOCAB_SIZE)
    probs[row.token_ids] = row.probs
    return probs


NOISY_MODELS = st.builds(TwoModels, st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 3.0]))


@settings(max_examples=50)
@given(NOISY_MODELS, st.floats(0.01, 1))
def test_threshold_by_definition(models: TwoModels, threshold: float) -> None:
    """The error is the excess probability of accepted tokens. It is 0 at threshold 1."""
    target, drafted = dense(models.target(())), dense(models.distribution(1, ()))
    kept = drafted * (target >= threshold * drafted)
    distance = np.abs(one_token_law(Threshold(threshold), models) - target).sum() / 2
    assert distance == pytest.approx(np.maximum(kept - target, 0).sum(), abs=1e-12)
    exact = one_token_law(Threshold(1.0), models)
    np.testing.assert_allclose(exact, target, atol=1e-12)


def test_threshold_1_is_lossy_with_the_usual_residual() -> None:
    """The example of `Threshold`'s docstring and the README, in figures."""
    target, drafted = np.array([0.5, 0.5]), np.array([0.8, 0.2])
    kept = drafted * (target >= drafted)
    usual, ours = np.maximum(target - drafted, 0), np.maximum(target - kept, 0)
    rejected = 1 - kept.sum()
    np.testing.assert_allclose(kept + rejected * usual / usual.sum(), [0, 1])
    np.testing.assert_allclose(kept + rejected * ours / ours.sum(), [0.5, 0.5])


@settings(max_examples=50)
@given(NOISY_MODELS, st.floats(0.01, 1))
def test_typical_by_definition(models: TwoModels, threshold: float) -> None:
    target, drafted = dense(models.target(())), dense(models.distribution(1, ()))
    entropy = -sum(p * np.log(p) for p in target if p)
    kept = drafted * (target > min(threshold, threshold**0.5 * np.exp(-entropy)))
    expected = kept + (1 - kept.sum()) * target
    np.testing.assert_allclose(one_token_law(Typical(threshold), models), expected, atol=1e-12)


@settings(max_examples=50)
@given(NOISY_MODELS, st.sampled_from([BlockRejection(), TokenRejection()]), st.integers(0, 2**31))
def test_a_draft_ends_where_nothing_can_follow(models: TwoModels, verifier: Any, seed: int) -> None:
    """Options may ban every token after a draft token. The tokens before are verified like a whole draft."""

    class Dead(PrefixRows):
        def distribution(self, i: int) -> Distribution:
            if i == dead:
                raise NoTokenLeft("none left", row=i)
            return super().distribution(i)

    for _, token_ids in models.drafts():
        for dead in range(1, len(token_ids) + 1):
            rows: Any = Dead(models, token_ids)
            request = Request(
                sequence=Sequence([], 0),
                sampler=LogitsSampler(GenerationConfig(), []),
                verifier=verifier,
                noise=Noise(seed),
                text=TextStream(lambda _: ""),
                max_new_tokens=10,
                eos_token_ids=frozenset(),
            )
            draft = models.draft(token_ids)
            alone = verifier.verify(draft.cut(dead), PrefixRows(models, token_ids), Noise(seed), 0)
            whole = Outcome.of_chain(dead - 1, token_ids[dead - 1])
            assert verify(request, draft, rows) == (whole if alone.num_accepted == dead else alone)


@pytest.mark.parametrize("name", LOSSY)
def test_a_tree_is_refused_by_verifiers_of_chains(name: str) -> None:
    verifier: Any = SAMPLING_VERIFIERS[name]()
    draft = Draft([1, 2], parents=[-1, -1])
    with pytest.raises(RequestError, match=rf"parents=\[-1, -1\]\), and {type(verifier).__name__} reads chains only"):
        verifier.verify(draft, PrefixRows(TwoModels(0, 1.0), (1, 2)), Noise(0), 0)


def test_every_sampling_mode_has_a_verifier_and_says_whether_it_is_lossless() -> None:
    assert list(SAMPLING_VERIFIERS) == list(SAMPLING)
    for name, make in SAMPLING_VERIFIERS.items():
        assert make().lossless == make().trees == (name not in LOSSY)
        assert ((make().__doc__ or "").startswith("Lossy")) == (name in LOSSY)
        assert ("LOSSY" in SAMPLING[name]) == (name in LOSSY)


@pytest.mark.parametrize("sampling", LOSSY)
def test_lossy_answers_say_so(toy_engine: outrider.Engine, sampling: str) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0,
        "max_new_tokens": 30,
        "seed": 0,
        "ignore_eos": True,
        "num_assistant_tokens": 3,
    }
    lossy = toy_engine.generate("abc", sampling=sampling, acceptance_threshold=0.01, **options)
    exact = toy_engine.generate("abc", sampling="rejection", **options)
    assert not lossy.lossless
    assert lossy.as_dict()["lossless"] is False
    assert exact.lossless
    assert lossy.stats.acceptance_rate > exact.stats.acceptance_rate
