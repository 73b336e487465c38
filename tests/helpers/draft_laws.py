"""What a verifier makes of drafts, in closed form: toy models, all of their drafts, and the law of the tokens."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enumeration import ways
from in_the_loop import ask, new_request
from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.decoding.reading import verify
from outrider.errors import NoTokenLeft
from outrider.tokens.sampling import DraftRows, LogitsSampler
from outrider.types import Distribution, Draft, LogitsRow, Noise

Law = dict[tuple[int, ...], float]


def tokens_before(draft: Draft, row: int) -> tuple[int, ...]:
    """The draft tokens before a row, by definition."""
    if draft.parents is None:
        return tuple(draft.token_ids[:row])
    return () if row == 0 else (*tokens_before(draft, draft.parents[row - 1] + 1), draft.token_ids[row - 1])


@dataclass
class Models:
    """A main and a draft model (roles 0 and 1), whose logits depend on all tokens before; some are −inf.

    gaps: the share of places at which a draft ends, which depends on the tokens before alone.
    """

    seed: int
    sharpness: float = 1.0
    vocab_size: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    gaps: float = 0.0
    rows: dict[Any, LogitsRow] = field(default_factory=dict)

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, len(key), *key])

    def row(self, role: int, context: Sequence[int]) -> LogitsRow:
        key = (role, *context)
        if key not in self.rows:
            rng = self.rng(*key)
            logits = self.sharpness * rng.normal(size=self.vocab_size)
            hidden = rng.random(self.vocab_size) < 0.15
            hidden[rng.integers(self.vocab_size)] = False
            self.rows[key] = LogitsRow.of(np.where(hidden, -np.inf, logits).astype(np.float32))
        return self.rows[key]

    def sampler(self) -> LogitsSampler:
        return LogitsSampler(GenerationConfig(**{"temperature": 1.0} | self.options), [])

    def rows_of(self, draft: Draft, role: int = 0, context: Sequence[int] = (), sampler: Any = None) -> DraftRows:
        def row(i: int) -> LogitsRow:
            return self.row(role, (*context, *tokens_before(draft, i)))

        return DraftRows(row, sampler or self.sampler(), draft)

    def distribution(self, role: int, prefix: tuple[int, ...]) -> Distribution | None:
        """None if the options leave no token."""
        try:
            return self.sampler().distribution(self.row(role, prefix), prefix)
        except NoTokenLeft:
            return None

    def request(self, verifier: Any, seed: int = 0, **options: Any) -> Answer:
        own: dict[str, Any] = {"sampler": self.sampler(), "noise": Noise(seed), "max_new_tokens": 9, "reuse": False}
        return new_request([], verifier=verifier, **own | options)


def trees(
    models: Models, shape: list[int], certain: bool, probability: float = 1.0, made: tuple[Any, ...] = ()
) -> Iterator[tuple[float, Draft]]:
    """Every tree of this shape that may be drawn, with its probability. A row may have too few tokens for the shape.

    made: for each node so far its token, draft_probs and prefix; None if there was no token for it.
    """
    if len(made) == len(shape):
        kept = [i for i, node in enumerate(made) if node]
        index = {-1: -1} | {i: n for n, i in enumerate(kept)}
        parents = [index[shape[i]] for i in kept]
        probs = None if certain else [made[i][1] for i in kept]
        is_chain = parents == [*range(-1, len(kept) - 1)]
        yield probability, Draft([made[i][0] for i in kept], probs, parents=None if is_chain else parents)
        return
    parent = shape[len(made)]
    above = made[parent] if parent >= 0 else None
    if parent >= 0 and above is None:
        yield from trees(models, shape, certain, probability, (*made, None))
        return
    prefix: tuple[int, ...] = (*above[2], above[0]) if above else ()
    siblings = [node[0] for i, node in enumerate(made) if shape[i] == parent and node]
    if certain:  # in an order that depends on the prefix
        order = models.rng(2, *prefix).permutation(models.vocab_size).tolist()
        pairs = [(order[len(siblings)], 1.0)] if len(siblings) < len(order) else []
    else:
        row = models.distribution(1, prefix) or Distribution(np.arange(0), np.ones(0))
        left = {x: p for x, p in zip(row.token_ids.tolist(), row.probs.tolist(), strict=True) if x not in siblings}
        pairs = [(x, p / sum(left.values())) for x, p in left.items()]
    if models.gaps and models.rng(3, len(siblings), *prefix).random() < models.gaps:
        pairs = []
    drawn = Distribution(np.array([x for x, _ in pairs]), np.array([p for _, p in pairs]))
    for x, p in pairs:
        yield from trees(models, shape, certain, probability * p, (*made, (x, drawn, prefix)))
    if not pairs:
        yield from trees(models, shape, certain, probability, (*made, None))


def output_law(verifier: Any, models: Models, shape: list[int], certain: bool, length: int) -> tuple[Law, float]:
    """The law of the first tokens after one round and plain sampling, and the accepted tokens on average."""
    starts: Law = defaultdict(float)
    accepted = 0.0
    for p_draft, draft in trees(models, shape, certain):

        def judge(noise: Noise, draft: Draft = draft) -> Any:
            request = models.request(verifier)
            ask(request, noise=noise)
            return verify(request, draft, models.rows_of(draft))

        for way, outcome in ways(judge, drawn=False):
            p, last = p_draft * way.probability, way.last
            accepted += p * outcome.num_accepted
            path = tuple(draft.token_ids[i] for i in outcome.path)
            ends = zip(last.token_ids, last.probs, strict=True) if last else [(outcome.next_token_id, 1.0)]
            for token_id, q in ends:
                starts[(*path, int(token_id))] += p * q
    law: Law = defaultdict(float)
    for start, p in starts.items():
        for end, rest in plain_law(models, length, start).items():
            law[end] += p * rest
    return law, accepted


def plain_law(models: Models, length: int, start: tuple[int, ...] = ()) -> Law:
    row = models.distribution(0, start) if len(start) < length else None
    if row is None:
        return {start: 1.0}
    law: Law = {}
    for token_id, p in zip(row.token_ids.tolist(), row.probs.tolist(), strict=True):
        law |= {end: p * rest for end, rest in plain_law(models, length, (*start, token_id)).items()}
    return law
