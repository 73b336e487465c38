"""Tokens, distributions, drafts and outcomes, and the roles that decide on them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.types.backend import LogitsRow, Pending
    from outrider.types.calls import CallObserver


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's committed tokens: the prompt, then the answer. Draft tokens enter only when accepted.

    references: other texts that a drafter may copy from, as `outrider.drafters.References`. scope: the prompt's.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    references: tuple[Any, ...] = ()
    scope: bytes = b""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def generated_token_ids(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The probabilities of all tokens whose probability is not 0.

    token_ids: int64 [n], ascending. probs: float64 [n], summing to 1.
    """

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token_id: int) -> float:
        """The probability of one token, 0 outside the support."""
        at = int(np.searchsorted(self.token_ids, token_id))
        if at < len(self.token_ids) and self.token_ids[at] == token_id:
            return float(self.probs[at])
        return 0.0

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        cumulative = np.cumsum(self.probs)
        # Scaling by the last sum, which may be 1 ± 1e-16, keeps the draw inside the support.
        at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.token_ids[min(at, len(self.token_ids) - 1)])


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers as a function of the position they are used at, without hidden state.

    Counter-based (Philox 4x64-10; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the same key
    gives the same numbers on every platform.
    """

    seed: int
    sample: int = 0

    def uniforms(self, position: int, purpose: str, count: int) -> NDArray[np.float64]:
        """`count` independent numbers in [0, 1) for one purpose of the round that begins at `position`.

        Rounds begin at different positions, so no two rounds share a number. Block-wise acceptance would be biased
        if they did.
        """
        bits = np.random.Philox(
            key=self.seed + (self.sample << 64), counter=(position << 128) + (zlib.crc32(purpose.encode()) << 64)
        ).random_raw(count)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def gumbel(self, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Standard Gumbel noise float64 [n] for tokens at a position. A token's noise depends on nothing else.

        Each position has a SplitMix64 sequence (Steele et al. 2014, "Fast splittable pseudorandom number generators")
        that starts at a Philox number. A token's number is the one at its id.
        """
        key, counter = self.seed + (self.sample << 64), (position << 128) + (_GUMBEL << 64)
        bits = np.random.Philox(key=key, counter=counter).random_raw(1)
        bits = bits + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        # The middle of each interval: never 0, never 1.
        uniforms = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(-np.log(uniforms))


_GUMBEL = zlib.crc32(b"gumbel")


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a drafter proposes: a chain, or a tree.

    token_ids: [n], in a tree parents before children. probs: for each token the distribution it was drawn from, if the
    verifier's mode needs it; None if the tokens were chosen without the round's noise (n-gram drafts), or are judged by
    equality (greedy, coupled). confidences: for each token the drafter's estimate of its acceptance, given that those
    before it are accepted; None without estimates. parents: [n], for each token the index of the one that it follows,
    −1 for the newest committed token; None for a chain.
    """

    token_ids: list[int]
    probs: list[Distribution] | None = None
    confidences: list[float] | None = None
    parents: list[int] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """The first `length` tokens."""
        probs = None if self.probs is None else self.probs[:length]
        confidences = None if self.confidences is None else self.confidences[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], probs, confidences, parents)

    def check_chain(self, reader: object) -> None:
        """Raise RequestError if this is a tree. reader: the caller, which reads only chains."""
        if self.parents is not None:
            raise RequestError(
                f"A draft of {len(self)} tokens is a tree (parents={self.parents}), and {type(reader).__name__} judges "
                "chains alone. Propose one of its paths, with parents=None."
            )


NO_DRAFT = Draft([])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verifier's decision on a draft.

    path: the indices of the accepted draft tokens, in order. next_token_id: the recovered token in place of the first
    rejected one, or the bonus token after a draft that was accepted whole.
    """

    path: list[int]
    next_token_id: int

    @classmethod
    def of_chain(cls, num_accepted: int, next_token_id: int) -> Outcome:
        """The first `num_accepted` tokens of a chain are accepted."""
        return cls([*range(num_accepted)], next_token_id)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a round committed to one sequence, for its drafter.

    token_ids: [k], the committed tokens that the main model has read in this round: a piece of the prompt, or the
    newest token before the round and the accepted draft tokens. Their positions follow those of the round before. The
    sequence already has them and, behind them, its newest token, recovered or bonus, which is read next.
    path: the indices of the accepted draft tokens; empty if no draft was judged. If the answer ended within the draft,
    the path still has the accepted tokens behind that end: it shows how good the draft was.
    features: float32 [k, width], the main model's hidden states of these tokens, as the drafter's `Requirements` ask
    for; None if they ask for none. Valid until the main model's next call.
    """

    token_ids: list[int]
    path: list[int]
    features: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a drafter needs besides tokens.

    features: names from the main model's `Capabilities.features`. trees: whether drafts have to be judged as trees.
    """

    features: tuple[str, ...] = ()
    trees: bool = False

    @classmethod
    def of(cls, drafter: Drafter | None) -> Requirements:
        """A drafter's `requirements`; nothing if it has no such attribute."""
        found: Requirements | None = getattr(drafter, "requirements", None)
        return cls() if found is None else found


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of an answer's token, and the likeliest tokens at its position, as (token_id, logprob).

    Natural logarithms. `top` is in descending order and holds the chosen token only if it is one of the likeliest. It
    has fewer tokens than requested if fewer have a probability above 0, so that no number is −inf.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TextTokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def prefix(self) -> Seq[int]:
        """The special tokens that every text begins with."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that continues another: no prefix is added. Special tokens are recognised."""

    def encode_prompt(
        self, prompt: str | Seq[Mapping[str, Any]] | Seq[int], *, chat_template: bool = True
    ) -> list[int]:
        """The token ids of a prompt: text, chat messages, or token ids."""

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of tokens, without special tokens."""


class Sampler(Protocol):
    """Turns one sequence's rows of logits into decisions, by all processors in their fixed order.

    prefix: the draft tokens between the committed tokens and the row, taken as accepted.
    """

    def best(self, row: LogitsRow, prefix: Seq[int]) -> int:
        """The token with the highest processed logit; the lowest id among equals."""

    def distribution(self, row: LogitsRow, prefix: Seq[int]) -> Distribution:
        """The probabilities after all processors. The bits do not depend on `row.top`."""

    def logprobs(self, row: LogitsRow, prefix: Seq[int], token_id: int) -> TokenLogprobs:
        """The log-probabilities for a token that was chosen at this row."""

    def commit(self, token_ids: Seq[int]) -> None:
        """Add committed tokens to the processors' state."""


class Rows(Protocol):
    """A model's rows along one draft: row i follows i draft tokens. A row is processed when it is needed."""

    def best(self, i: int) -> int:
        """The token with the highest processed logit at row i."""

    def distribution(self, i: int) -> Distribution:
        """target_probs at row i; draft_probs for a draft model's rows."""


class Verifier(Protocol):
    """A way to choose tokens: how a draft model draws them, and how the main model accepts or rejects them."""

    @property
    def lossless(self) -> bool:
        """Whether the text has the main model's distribution."""

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, Distribution | None]:
        """The draft token at row i of a draft that begins at `position`, and its draft_probs if `verify` needs them.

        A drawn token is submitted, whatever it is: dropping one after seeing it would bias the output.
        """

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`.

        Reads rows from left to right: none behind a rejected token, and the last one only if the whole draft is
        accepted.
        """


class DraftRule(Protocol):
    """Decides how far a draft goes, token by token."""

    def wants_more(self, confidences: Seq[float]) -> bool:
        """Whether another token is wanted after tokens with these confidences.

        Called before the token is drawn: dropping one after seeing it would bias sampling.
        """


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a draft: up to `limit` tokens for one sequence, none behind one of `eos_token_ids`.

    rule: may end the draft earlier. num_left: tokens that the answer may still get. ahead: whether `draft_ahead` may be
    called for the sequence. observer: is told of the model calls for the draft.
    """

    sequence: Sequence
    limit: int
    sampler: Sampler
    verifier: Verifier
    noise: Noise
    eos_token_ids: frozenset[int]
    rule: DraftRule | None = None
    num_left: int = 0
    ahead: bool = False
    observer: CallObserver | None = None


class Drafter(Protocol):
    """Proposes tokens. Holds state per sequence from `reserve` to `release`.

    May have `requirements`, of type `Requirements`.
    """

    num_assistant_tokens: int  # tokens per round, unless the request says otherwise

    @property
    def seconds(self) -> float:
        """Seconds spent in model calls so far."""

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int) -> bool:
        """Reserve room for a sequence that may grow to `max_tokens`; False while there is none.

        num_cached: tokens of the prompt in the main model's prefix cache. The main model reads from that position on,
        so `observe` gets committed tokens, and hidden states, from there on.
        """

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft for each request, in order. An empty draft costs nothing."""

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Take in what a round has committed, including pieces of the prompt. The sequence has it already."""

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence's state and free its room. No effect for an unknown sequence."""


class AheadDrafter(Drafter, Protocol):
    """A drafter that can draft during the target pass."""

    @property
    def ahead_seconds(self) -> float:
        """Seconds spent in model calls during target passes; not part of `seconds`."""

    def draft_ahead(self, requests: Seq[DraftRequest], drafts: Seq[Draft], check: Pending) -> None:
        """Draft for the next round until the target pass `check` is done. requests, drafts: this round's."""
