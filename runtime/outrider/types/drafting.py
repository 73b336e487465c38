"""The interfaces of drafters and of the policies that choose between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.types.decoding import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from outrider.types.backend import CallObserver, Pending, Slot
    from outrider.types.decoding import Draft, Sampler, TokenSequence, Verifier
    from outrider.types.prompt import Prompt
    from outrider.types.randomness import Noise


@dataclass(frozen=True, slots=True)
class Committed:
    """What a round committed to one sequence, for its drafter.

    token_ids: [k], the committed tokens that the main model has read in this round: a piece of the prompt, or the
    newest token before the round and the accepted draft tokens. Their positions follow those of the round before. The
    sequence already has them and, after them, its newest token, recovered or bonus, which is read next.
    path: the indices of the accepted draft tokens; empty if no draft was verified. If the answer ended within the
    draft, the path still has the accepted tokens after that end: it shows how good the draft was.
    features: float32 [k, width], the main model's hidden states of these tokens, as the drafter's `Requirements` ask
    for; None if they ask for none. Valid until the main model's next call.
    beside_prompts: whether pieces of prompts were read in the same call, so that its seconds are not those of answers.
    """

    token_ids: list[int]
    path: list[int]
    features: NDArray[np.float32] | None = None
    beside_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a drafter needs besides tokens.

    features: names from the main model's `Capabilities.features`. trees: whether drafts have to be verified as trees.
    """

    features: tuple[str, ...] = ()
    trees: bool = False


class DraftRule(Protocol):
    """Decides how far a draft goes, token by token."""

    def wants_more(self, confidences: Sequence[float]) -> bool:
        """Whether another token is wanted after tokens with these confidences.

        Called before the token is drawn: dropping one after seeing it would bias sampling.
        """

    @property
    def wants_branches(self) -> bool:
        """Whether second candidates may be wanted, for drafts that may be trees."""

    def branch_places(self, confidences: Sequence[float]) -> list[int]:
        """The places of a chain with these confidences at which a second candidate is wanted."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a draft: up to `limit` tokens for one sequence, none after one of `eos_token_ids`.

    rule: may end the draft earlier. num_left: tokens that the answer may still get. ahead: whether `draft_ahead` may be
    called for the sequence. trees: whether the draft may be a tree. observer: is told of the model calls for the draft.
    slot: the sequence's slot in the main model's cache, for a drafter that is a part of that model. together: answers
    that are decoded in this round, and wait for the drafter. is_cancelled: whether the answer was cancelled meanwhile,
    so that no more calls are to be made for it.
    """

    sequence: TokenSequence
    limit: int
    sampler: Sampler
    verifier: Verifier
    noise: Noise
    eos_token_ids: frozenset[int]
    rule: DraftRule | None = None
    num_left: int = 0
    ahead: bool = False
    trees: bool = False
    observer: CallObserver | None = None
    slot: Slot | None = None
    together: int = 1
    is_cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Guess:
    """A possible outcome of a draft.

    chance: its probability. num_accepted: accepted tokens. token_id: the recovered token after these; None: the whole
    draft is accepted, and the bonus token is the one that the draft model expects.
    """

    chance: float
    num_accepted: int
    token_id: int | None = None


class Proposer(Protocol):
    """The least that an app's drafter has. Whatever else it has of `Drafter` is used, too."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter`."""


class Drafter:
    """Proposes tokens. Holds state per sequence from `reserve` to `release`.

    A subclass has `propose`, and whatever else differs from what is here: a drafter that keeps nothing, calls no model
    and does not know its price. An app's class may do without this base (`Proposer`); what it lacks is as here.

    num_assistant_tokens: tokens per round, unless the request says otherwise. requirements: what it needs besides
    tokens. takes_rules: whether it follows a request's rule. seconds: spent in model calls so far. name: of one that
    the engine makes itself; empty: the class's.

    is_priced: whether the cost of its calls is known, so that a controller can choose it. is_free: whether its drafts
    cost nothing and do not depend on the noise: the controller asks it before it chooses. at_once: whether one call
    gives a whole draft, instead of one token. most_tokens: of a draft; None: no limit. first_seconds: extra seconds of
    its next call, if that is the first.

    replays: whether it can draft an ended answer again from its tokens alone, in a slot of its own.

    goes_ahead: whether it can draft during the target pass. ahead_seconds: spent in model calls during target passes;
    not part of `seconds`.
    """

    num_assistant_tokens: int = 4
    requirements: Requirements = Requirements()
    takes_rules: bool = False
    seconds: float = 0.0
    name: str = ""
    is_priced: bool = False
    is_free: bool = False
    at_once: bool = False
    most_tokens: int | None = None
    first_seconds: float = 0.0
    replays: bool = False
    goes_ahead: bool = False
    ahead_seconds: float = 0.0

    def prompt_of(self, sequence: TokenSequence) -> Prompt | None:  # noqa: ARG002
        """What its model reads of a sequence that begins; None without a model. From any thread."""
        return None

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int) -> bool:  # noqa: ARG002
        """Reserve room for a sequence that may grow to `max_tokens`; False while there is none.

        num_cached: tokens of the prompt in the main model's prefix cache. The main model reads from that position on,
        so `observe` gets committed tokens, and hidden states, from there on.
        """
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, in order. An empty draft costs nothing."""
        raise NotImplementedError(f"{type(self).__name__} proposes nothing")

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Take in what a round has committed, including pieces of the prompt. The sequence has it already."""

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's state and free its room. No effect for an unknown sequence."""

    def can_draft(self, request: DraftRequest) -> bool:  # noqa: ARG002
        """Whether the sequence has a slot with room for the draft."""
        return True

    def seconds_for(self, num_tokens: Sequence[int], context: float, before: int | None = None) -> float:  # noqa: ARG002
        """Seconds of one call. num_tokens: tokens to read, for each sequence. context: average length of the sequences.

        A draft takes one call per token, unless `at_once`. before: rows of the call before, if they matter.
        """
        return 0.0

    def num_unread(self, sequence: TokenSequence) -> int:  # noqa: ARG002
        """Committed tokens to read before the next draft; 0 for a sequence without a slot."""
        return 0

    def num_ahead(self, sequence: TokenSequence) -> int:  # noqa: ARG002
        """Tokens of the next draft that were drafted ahead."""
        return 0

    def guess(
        self,
        request: DraftRequest,  # noqa: ARG002
        draft: Draft,  # noqa: ARG002
        chance: Callable[[float], float],  # noqa: ARG002
        next_chance: float,  # noqa: ARG002
    ) -> Guess | None:
        """The likeliest outcome of a draft of this drafter, among those that it can draft ahead for; None for none.

        chance: a token's probability of acceptance, by its confidence. next_chance: the probability that the bonus
        token is the one that the drafter expects.
        """
        return None

    def draft_ahead(
        self,
        requests: Sequence[DraftRequest],
        drafts: Sequence[Draft],
        check: Pending,
        guesses: Sequence[Guess | None] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Draft for the next round until the target pass `check` is done. requests, drafts: this round's.

        guesses: the outcomes to draft from. max_calls: most calls; None: no limit.
        """


class Copier(Drafter):
    """The base of drafters without a model: their drafts cost nothing, and do not depend on the noise.

    A subclass implements `reserve`, `propose` and `release`. `propose` can read the committed tokens itself.
    """

    is_priced = is_free = at_once = True


@dataclass(slots=True)
class Turn:
    """One request's drafter and draft in one round.

    drafter: proposes the draft for `request`; None if the policy gave the draft itself, or wants none. copier: made the
    draft that the policy gave.
    """

    request: DraftRequest
    drafter: Drafter | None = None
    draft: Draft = NO_DRAFT
    copier: Drafter | None = None

    @property
    def author(self) -> Drafter | None:
        """Which drafter made the draft."""
        return self.copier if self.drafter is None else self.drafter


class DraftPolicy:
    """Chooses in each round which drafter drafts for each request, and how far. A subclass implements `choose`.

    Requests with equal policies are handled together. A policy is not a drafter: the loop calls the drafters that it
    chooses, and tells them before the policy what is committed.

    drafters: all that it may choose; a request reserves room with each. goes_ahead: whether `go_ahead` may draft during
    target passes.
    """

    drafters: Sequence[Drafter] = ()
    goes_ahead = False

    def choose(self, requests: Sequence[DraftRequest]) -> Sequence[Turn]:
        """A turn for each request, in order."""
        raise NotImplementedError

    def drafted(self) -> None:
        """Take in that the chosen turns have their drafts. Called before the target pass."""

    def go_ahead(self, turns: Sequence[Turn], check: Pending) -> None:
        """Let drafters draft for the next round during these turns' target pass `check`, as far as that pays."""

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Take in what a round has committed, including pieces of the prompt."""

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's state. No effect for an unknown sequence."""

    def replay(self, is_cancelled: Callable[[], bool]) -> Iterable[None]:  # noqa: ARG002
        """Draft an ended answer again to learn from it, one draft at a time, while no request runs.

        is_cancelled: whether a request has come, so that no more calls are to be made.
        """
        return ()
