"""Two silent errors in rejection sampling: random numbers that are used twice, and drawn tokens that are dropped."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from in_the_loop import new_request
from outrider.config import GenerationConfig
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.row_budget import RowBudget
from outrider.drafters import DraftModel, Ngram
from outrider.testing import FakeBackend
from outrider.tokens.sampling import DraftRows, LogitsSampler
from outrider.tokens.verifiers import BlockRejection, Greedy, Threshold, TokenRejection, Typical
from outrider.types import Draft, Drafter, LogitsRow, Noise, Outcome, Rows, TokenSequence
from outrider_bench.modes.ours import Shuffled

VOCAB_SIZE = 6
CONFIG = GenerationConfig(temperature=1.0, max_new_tokens=60)


@dataclass(frozen=True)
class RecordingNoise(Noise):
    """Records the rounds in which each number was used. The length of the sequence identifies a round."""

    sequence: TokenSequence = field(default_factory=lambda: TokenSequence([], 0))
    rounds: dict[float, set[int]] = field(default_factory=lambda: defaultdict(set))

    def uniforms(self, position: int, purpose: str, count: int) -> np.ndarray:
        made = super().uniforms(position, purpose, count)
        for number in made.tolist():
            self.rounds[number].add(len(self.sequence))
        return made


class Recording:
    """A verifier that records drawn tokens, and asserts that it gets all of them to verify."""

    lossless = True
    trees = False

    def __init__(self, verifier: Any) -> None:
        self.verifier = verifier
        self.drawn: list[int] = []
        self.num_drawn = 0

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> Any:
        made = self.verifier.draw(rows, i, noise, position)
        self.drawn.append(made[0])
        return made

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        if draft.probs:
            assert draft.token_ids == self.drawn, "a drawn token was not submitted"
            assert len(draft.probs) == len(draft)
        else:
            assert not self.drawn, "drawn tokens were dropped"
        self.num_drawn += len(self.drawn)
        self.drawn.clear()
        outcome: Outcome = self.verifier.verify(draft, rows, noise, position)
        return outcome


def make_drafter(kind: str) -> Drafter:
    model = DraftModel(FakeBackend(VOCAB_SIZE, seed=1, noise=0.7, memory=99), context_length=1000)
    return Shuffled([model, Ngram()]) if kind == "shuffled" else model


def run(verifier: Any, drafter: Drafter, seed: int) -> RecordingNoise:
    sequence = TokenSequence([1, 2, 3, 1, 2], 5)
    noise = RecordingNoise(seed, sequence=sequence)
    finish(sequence, verifier, drafter, noise=noise, eos={5} if seed % 2 else set())
    return noise


def finish(
    sequence: TokenSequence, verifier: Any, drafter: Drafter | None, *, noise: Noise | None = None, eos: Any = ()
) -> None:
    """Bring an answer to its end."""
    sampler = LogitsSampler(CONFIG, sequence.token_ids)
    fields: dict[str, Any] = {"noise": noise or Noise(0), "max_new_tokens": 60, "eos_token_ids": frozenset(eos)}
    request = new_request([], drafter, sequence=sequence, sampler=sampler, verifier=verifier, **fields)
    for _ in RequestQueue(FakeBackend(VOCAB_SIZE, seed=1, memory=99), RowBudget(512)).run(request):
        pass


@pytest.mark.parametrize("kind", ["draft", "shuffled"])
@pytest.mark.parametrize("verifier", [TokenRejection(), BlockRejection(), Threshold(), Typical()], ids=str)
def test_no_number_serves_two_rounds_and_every_drawn_token_is_submitted(verifier: Any, kind: str) -> None:
    """Numbers are keyed by the round's position. Keyed by the token's, they would repeat after a rejection.

    In block verification, acceptance depends on later tokens. After a rejection, these would be drawn again with
    numbers that have already influenced the result. Dropping improbable tokens, or choosing between drafts by what is
    in them, would bias the output.
    """
    recording = Recording(verifier)
    for seed in range(8):
        noise = run(recording, make_drafter(kind), seed)
        assert len(noise.rounds) > 30 or seed % 2
        assert all(len(rounds) == 1 for rounds in noise.rounds.values())
    assert recording.num_drawn > 100


def test_row_i_sees_the_i_draft_tokens_before_it() -> None:
    """For every option: it must count the same tokens as in plain decoding."""
    seen: list[list[int]] = []

    class RecordingSampler(LogitsSampler):
        def best(self, row: Any, prefix: Any) -> int:
            seen.append(list(prefix))
            return super().best(row, prefix)

        def distribution(self, row: Any, prefix: Any) -> Any:
            seen.append(list(prefix))
            return super().distribution(row, prefix)

        def logprobs(self, row: Any, prefix: Any, token_id: int) -> Any:
            seen.append(list(prefix))
            return super().logprobs(row, prefix, token_id)

    row = LogitsRow.of(np.zeros(VOCAB_SIZE, dtype=np.float32))
    rows = DraftRows(lambda _: row, RecordingSampler(CONFIG, []), Draft([3, 4, 5]))
    for i in range(4):
        rows.best(i)
        rows.distribution(i)
        rows.logprobs(i, 0)
    assert seen == [[3, 4, 5][:i] for i in range(4) for _ in range(3)]


def test_a_draft_model_forgets_what_was_rejected_though_another_drafts_on() -> None:
    """Every other round uses another drafter's right draft. The draft model must not continue from its own."""
    plain = TokenSequence([1, 2, 3], 3)
    finish(plain, Greedy(), None)

    def draft_model(kind: type[DraftModel]) -> DraftModel:
        return kind(FakeBackend(VOCAB_SIZE, seed=1, noise=0.7, memory=99), context_length=1000)

    class Interrupted(DraftModel):
        num_rounds = 0

        def propose(self, requests: Any) -> list[Draft]:
            if not requests:
                return []
            sequence = requests[0].sequence
            self.num_rounds += 1
            if self.num_rounds % 2:
                drafts = super().propose(requests)
                fresh = draft_model(DraftModel)
                fresh.reserve(sequence, 1000)
                assert drafts == fresh.propose(requests)
                return drafts
            return [Draft(plain.token_ids[len(sequence) :][: requests[0].limit])]

    sequence = TokenSequence([1, 2, 3], 3)
    drafter = draft_model(Interrupted)
    finish(sequence, Greedy(), drafter)
    assert sequence.token_ids == plain.token_ids
    assert isinstance(drafter, Interrupted)
    assert drafter.num_rounds > 9
