"""What drafters are asked and told, and the roles of those that draft and those that choose a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

from outrider.types.decoding import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    import numpy as np
    from numpy.typing import NDArray

    from outrider.types.backend import Pending
    from outrider.types.decoding import Draft, Noise, Sampler, Sequence, Verifier


@dataclass(frozen=True, slots=True)
class Committed:
    """What has become certain of one sequence in a round, for its drafter.

    token_ids: [k], tokens that the main model has read in the round and that stay, at positions that follow on from
    those of the round before: a piece of the prompt, or the newest token so far and what was accepted of the draft. All
    are in the sequence by now, and behind them its newest token, recovered or bonus, which is read next.
    path: the draft's accepted tokens, by index; empty where none was judged. Where the answer ended inside of a draft,
    the path goes on behind that end: it says how good the draft was.
    features: float32 [k, width], the main model's hidden states of these tokens, as the drafter's `Requirements` ask
    for them; None where they ask for none. Valid until the main model's next call.
    """

    token_ids: list[int]
    path: list[int]
    features: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a drafter needs besides tokens.

    features: hidden states of the main model, by names out of its `Capabilities.features`. trees: that drafts are
    judged as trees.
    """

    features: tuple[str, ...] = ()
    trees: bool = False

    @classmethod
    def of(cls, drafter: Drafter | None) -> Requirements:
        """What a drafter says in `requirements`; one that does not say needs nothing."""
        found: Requirements | None = getattr(drafter, "requirements", None)
        return cls() if found is None else found


class DraftRule(Protocol):
    """Decides how far a draft goes, token by token."""

    def wants_more(self, confidences: Seq[float]) -> bool:
        """Whether another token is wanted behind those that were drawn with these confidences.

        Asked before the token is drawn: dropping one after seeing it would bias what is sampled.
        """


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence for which up to `limit` tokens are wanted, none behind one of `eos_token_ids`.

    rule: what may end a draft earlier. num_left: tokens that the answer may still get. ahead: whether `draft_ahead` may
    be called for it.
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


class Drafter(Protocol):
    """Proposes tokens. Keeps what it needs per sequence from `reserve` to `release`.

    May have `requirements`, of type `Requirements`; `takes_rules`, whether it ends a draft where the request's rule
    says; `goes_ahead`, True for an `AheadDrafter`; and `is_priced`, True for a `PricedDrafter`.
    """

    num_assistant_tokens: int  # how many tokens a round it proposes unless the request says otherwise

    @property
    def seconds(self) -> float:
        """Time spent in model calls so far."""

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int) -> bool:
        """Take room for a sequence that may grow to `max_tokens`; False while there is none.

        num_cached: tokens that the main model has in its cache already. It reads on from there, so what is committed,
        and hidden states, begin with the token at that position.
        """

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft for each request, in order. An empty draft costs nothing."""

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Hear what a round has committed, of the prompt too. The sequence has it already."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its room back. Harmless for one that is not known."""


class AheadDrafter(Drafter, Protocol):
    """A drafter that can use the time in which its drafts are checked, if it has `goes_ahead`."""

    goes_ahead: bool

    @property
    def ahead_seconds(self) -> float:
        """Time spent in model calls while drafts were checked, which `seconds` leaves out."""

    def draft_ahead(self, requests: Seq[DraftRequest], drafts: Seq[Draft], check: Pending) -> None:
        """Draft for the next round, until `check` is done. The requests and drafts are the round's under way."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What may become of a draft that is being checked.

    chance: how likely that is. num_kept: tokens that are kept. token_id: the recovered one in place of the next; None
    for the one that the draft model expects behind all of them.
    """

    chance: float
    num_kept: int
    token_id: int | None = None


class PricedDrafter(AheadDrafter, Protocol):
    """A drafter that says what a draft would cost before it is asked for one, so that a controller can choose it.

    is_priced: whether what its calls cost is known. is_free: whether its drafts cost nothing, and are chosen without
    looking at the noise, so that it can be asked before it is chosen.
    """

    is_free: bool

    @property
    def is_priced(self) -> bool:
        """Whether what its calls cost is known."""

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether there is a place for the sequence, with room for as long a draft."""

    def seconds_for(self, num_tokens: Seq[int], context: float, before: int | None = None) -> float:
        """Seconds of one call that reads so many tokens of each of several sequences, of `context` tokens on average.

        A draft takes one call of a token each for every token of it. before: rows of the call before, if they matter.
        """

    def num_unread(self, sequence: Sequence) -> int:
        """Committed tokens that are to be read before the next draft; 0 where none can follow."""

    def num_ahead(self, sequence: Sequence) -> int:
        """Tokens of the next draft that are there already."""

    def follow(self, expected: float, seconds: float) -> None:
        """Adapt what calls cost to some that should have taken `expected` seconds, and took `seconds`."""

    def guess(
        self, request: DraftRequest, draft: Draft, chance: Callable[[float], float], next_chance: float
    ) -> Guess | None:
        """What is likeliest to become of a draft of its own, of all that it could draft ahead for; None for nothing.

        chance: how likely a token is to be kept, by its confidence. next_chance: how likely the token that it expects
        behind a draft is to follow.
        """

    def draft_ahead(
        self,
        requests: Seq[DraftRequest],
        drafts: Seq[Draft],
        check: Pending,
        guesses: Seq[Guess | None] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """As other drafters do; as if `guesses` had come true, and in `max_calls` calls at most."""


def is_priced(drafter: Drafter) -> TypeGuard[PricedDrafter]:
    """Whether a controller may choose a drafter; one that does not say is left to itself."""
    return bool(getattr(drafter, "is_priced", False))


def goes_ahead(drafter: Drafter) -> TypeGuard[AheadDrafter]:
    """Whether a drafter has a use for the time in which its drafts are checked."""
    return bool(getattr(drafter, "goes_ahead", False))


@dataclass(slots=True)
class Turn:
    """What drafts for one request in one round, and what it has drafted.

    drafter: is asked `request` for the draft; None where the draft is there already, or none is wanted.
    """

    request: DraftRequest
    drafter: Drafter | None = None
    draft: Draft = NO_DRAFT


class DraftPolicy(Protocol):
    """Says in each round which drafter drafts for each request, and how far, and hears what became of it.

    Requests whose policies are equal go together. It is no drafter: those that it names are asked by the loop, and hear
    what is committed before it does.
    """

    @property
    def drafters(self) -> Seq[Drafter]:
        """All that it may name. A request takes room with each of them."""

    @property
    def goes_ahead(self) -> bool:
        """Whether `go_ahead` has a use for the time in which drafts are checked."""

    def choose(self, requests: Seq[DraftRequest]) -> Seq[Turn]:
        """A turn for each request, in order."""

    def drafted(self) -> None:
        """Hear that the turns that it chose have their drafts, before these are checked."""

    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None:
        """Have drafters draft for the next round while the drafts of these turns are checked, as far as that pays."""

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Hear what a round has committed, of the prompt too."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence. Harmless for one that is not known."""
