"""One sequence as a draft model reads and continues it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import DeviceError, NoTokenLeft
from outrider.kv import num_common_tokens
from outrider.sampling import DraftRows, probability, without
from outrider.types import Distribution, Draft, Guess

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.types import Committed, DraftRequest, LogitsRow, Sequence, Slot


class Reader:
    """Reads and drafts in the main model's own tokens. Lives from `reserve` to `release`, with a new draft each round.

    Between rounds it may draft ahead, as if it were known what the main model makes of the draft under way. If it does,
    the next draft is begun already.

    slot: the sequence's place in the draft model's cache, with room for `room` draft tokens.
    """

    request: DraftRequest  # this round's
    can_draft_ahead = True

    def __init__(self, slot: Slot, room: int) -> None:
        self.slot = slot
        self.room = room
        self.unread: list[int] = []  # draft token ids that the model has to read before its next row
        self._num_context: int | None = None  # draft token ids that this round's draft stands behind
        self._num_committed = 0  # tokens of the sequence, when what follows was drafted ahead
        self._behind: list[int] = []  # what was expected to be kept of the draft then, and the token behind that
        self._token_ids: list[int] = []
        self._probs: list[Distribution] = []
        self._confidences: list[float] = []
        self._runners_up: list[tuple[int, float] | None] = []  # for each token the next best, and its probability

    def context(self, sequence: Sequence) -> list[int]:
        """The committed tokens, in the draft model's ids."""
        return sequence.token_ids

    def has_room(self, request: DraftRequest) -> bool:
        """Whether the context and a draft fit in the slot. The draft's last token is not read."""
        context = self.context(request.sequence)
        return bool(context) and len(context) + request.limit - 1 <= self.room

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft; False where no call is needed: no room for one, or all of it was drafted ahead."""
        if not self.num_ahead(request.sequence) or (request.rule and not self._confidences):
            self._forget_ahead(request.sequence)
        self.request, self._behind = request, []
        context = self.context(request.sequence)
        self._num_context = len(context)
        self._cut()
        self.slot.trim(max(len(context) + len(self._token_ids) - 1, 0))  # the last one is read for its row
        there = self.slot.length
        self.unread = context[there:] + self._token_ids[max(there - len(context), 0) :]
        if self._token_ids:
            return self.wants_more
        return self.has_room(request)

    def _cut(self) -> None:
        """Leave what this round wants of the tokens that were drafted ahead."""
        rule, count = self.request.rule, min(len(self._token_ids), self.request.limit)
        # As when they are drawn one by one, no token has a say in whether it is wanted.
        num_wanted = next((n for n in range(1, count) if rule and not rule.wants_more(self._confidences[:n])), count)
        for values in (self._token_ids, self._probs, self._confidences, self._runners_up):
            del values[num_wanted:]

    def choose(self, latest: LogitsRow) -> None:
        """Take the next token from its row."""
        request, i = self.request, len(self._token_ids)
        rows = self._rows(latest)
        try:
            token_id, probs = self._draw(rows, i)
        except NoTokenLeft:  # the draft ends here; the main model's own row is what may fail the request
            self.unread = []
            return
        if probs:
            self._probs.append(probs)
        self._token_ids.append(token_id)
        ahead = request.ahead and self.can_draft_ahead
        if request.rule or ahead:  # nobody else asks
            self._confidences.append(_confidence(latest, rows.found.get(i), token_id))
        if ahead:
            # Which token rejection sampling would put in its place is drawn from what only the main model knows.
            second = None if probs else self._runner_up(latest, i, token_id)
            found = None if second is None else (second, _confidence(latest, rows.found.get(i), second))
            self._runners_up.append(found)
        self.unread = [token_id]

    def _runner_up(self, latest: LogitsRow, i: int, token_id: int) -> int | None:
        """The token that would be taken but for `token_id`; None where no other is left."""
        try:
            return self._draw(self._rows(without(latest, token_id)), i)[0]
        except (NoTokenLeft, DeviceError):
            return None

    def _rows(self, latest: LogitsRow) -> DraftRows:
        """The latest row, which follows all draft tokens so far; what is behind the context is another draft's."""
        return DraftRows(lambda _: latest, self.request.sampler, self._token_ids, self._behind)

    def _draw(self, rows: DraftRows, i: int) -> tuple[int, Distribution | None]:
        request = self.request
        return request.verifier.draw(rows, i, request.noise, len(request.sequence) + len(self._behind))

    @property
    def wants_more(self) -> bool:
        """Whether another token may follow; not where the prompt is not read yet, nor behind an end."""
        request, token_ids = self.request, self._token_ids
        unfinished = 0 < len(token_ids) < request.limit and bool(self.unread)
        return unfinished and token_ids[-1] not in request.eos_token_ids and self._may_go_on

    @property
    def _may_go_on(self) -> bool:
        rule = self.request.rule
        return rule is None or rule.wants_more(self._confidences)

    @property
    def draft(self) -> Draft:
        """What has been chosen, in the main model's ids."""
        return Draft(self._token_ids, self._probs or None, self._confidences or None)

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Keep the cache up to the last accepted token, and what was drafted ahead if it came true."""
        num_context, self._num_context = self._num_context, None
        if self.num_ahead(sequence):
            return
        self._forget_ahead(sequence)
        if num_context is not None:  # else this round's draft was another's
            self.slot.trim(num_context + len(committed.path))

    def guess(
        self, draft: Draft, chance: Callable[[float], float] = lambda confidence: confidence, next_chance: float = 0.75
    ) -> Guess | None:
        """What is likeliest to become of this round's draft, of all that the next draft can be begun for.

        None where that is nothing. chance: how likely a token is to be kept, by its confidence. next_chance: how likely
        the token that the model expects behind a draft is to follow, if all of it is kept.
        """
        request = self.request
        if not (self.can_draft_ahead and self.unread and draft.token_ids and draft.token_ids == self._token_ids):
            return None  # it ended early, was cut, or is another's
        if len(request.sequence) + len(draft) + request.limit > self.room:
            return None
        kept, guesses = 1.0, []
        for i, (confidence, runner_up) in enumerate(zip(self._confidences, self._runners_up, strict=True)):
            is_kept = chance(confidence)
            token_id, probability = runner_up or (-1, 0.0)
            if probability and token_id not in request.eos_token_ids and i + 2 < request.num_left:
                share = probability / max(1 - confidence, probability)  # of the times that the token is not kept
                guesses.append(Guess(kept * (1 - is_kept) * share, i, token_id))
            kept *= is_kept
        if draft.token_ids[-1] not in request.eos_token_ids:
            guesses.append(Guess(kept * next_chance, len(draft)))
        return max(guesses, key=lambda guess: guess.chance, default=None)

    def begin_ahead(self, draft: Draft, guess: Guess) -> None:
        """Start to draft behind this round's draft, which is being checked, as if that had come true."""
        self._num_committed = len(self.request.sequence)
        self._clear()
        if guess.token_id is None:  # the first token to be chosen is the one that the main model is expected to add
            self._token_ids = [*draft.token_ids]
            return
        self._behind = [*draft.token_ids[: guess.num_kept], guess.token_id]
        self.unread = [guess.token_id]
        self.slot.trim(len(self.context(self.request.sequence)) + guess.num_kept)

    def goes_on_ahead(self) -> bool:
        """Take what was chosen last, and say whether another token may follow."""
        request = self.request
        if not self.unread or self.unread[-1] in request.eos_token_ids:
            return False
        if not self._behind:
            behind = self._token_ids
            self._clear()
            self._behind = behind
        return len(self._token_ids) < min(request.limit, request.num_left - len(self._behind) - 1)

    def num_ahead(self, sequence: Sequence) -> int:
        """Tokens of the next draft that are there already, as the round before went as expected."""
        came_true = bool(self._behind) and sequence.token_ids[self._num_committed :] == self._behind
        return len(self._token_ids) if came_true else 0

    def _forget_ahead(self, sequence: Sequence) -> None:
        """Drop what was drafted ahead, from the cache as far as it did not come true."""
        if self._behind:
            said = sequence.token_ids[self._num_committed :]
            self.slot.trim(self._num_committed + num_common_tokens(self._behind, said))
        self._clear()

    def _clear(self) -> None:
        self._behind, self._token_ids, self._probs, self._confidences, self._runners_up = [], [], [], [], []


def _confidence(latest: LogitsRow, drawn: Distribution | None, token_id: int) -> float:
    """The probability of a token that was taken: of draft_probs if they were asked for, else the model's own."""
    return drawn.prob(token_id) if drawn else probability(latest, token_id)
