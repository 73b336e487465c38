"""How a drafter chooses a draft's tokens from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import DeviceError, NoTokenLeft
from outrider.tokens.sampling import DraftRows, probability, without
from outrider.types import Distribution, Draft, DraftRequest, LogitsRow


class Choices:
    """One sequence's draft in the making: the tokens that were chosen so far."""

    request: DraftRequest  # this round's
    can_draft_ahead = False

    def __init__(self) -> None:
        self.unread: list[int] = []  # draft token ids to read before the next row
        self._guessed: list[int] = []  # tokens between the committed ones and the draft, when drafting ahead
        self._token_ids: list[int] = []
        self._probs: list[Distribution] = []
        self._confidences: list[float] = []
        self._runners_up: list[tuple[int, float] | None] = []  # for each token the next best and its probability
        self._branches: list[tuple[int, Distribution | None] | None] = []  # for each token a second candidate

    def choose_all(self, rows: Sequence[LogitsRow]) -> None:
        """Take tokens from the rows of a call that drafts several, as many as this round wants."""
        for i, row in enumerate(rows[: self.request.limit]):
            if i and not self._is_unfinished:
                break
            self.choose(row)

    def choose(self, latest: LogitsRow) -> None:
        """Take the next token from its row."""
        request, i = self.request, len(self._token_ids)
        rows = self._rows(latest)
        try:
            (token_id, probs), *others = self._draw(rows, i, 2 if self._draws_branches else 1)
        except NoTokenLeft:  # the draft ends here; only the main model's row may fail the request
            self.unread = []
            return
        self._branches.append(others[0] if others else None)
        if probs:
            self._probs.append(probs)
        self._token_ids.append(token_id)
        ahead = request.ahead and self.can_draft_ahead
        if request.rule or ahead:  # otherwise confidences are not used
            self._confidences.append(self._confidence(latest, rows.found.get(i), token_id))
        if ahead:
            # With rejection sampling, the recovered token depends on target_probs, which are unknown here.
            second = None if probs else self._runner_up(latest, i, token_id)
            found = None if second is None else (second, self._confidence(latest, rows.found.get(i), second))
            self._runners_up.append(found)
        self.unread = [token_id]

    def _runner_up(self, latest: LogitsRow, i: int, token_id: int) -> int | None:
        """The token that would be chosen without `token_id`; None if there is no other."""
        try:
            return self._draw(self._rows(without(latest, token_id)), i, 1)[0][0]
        except (NoTokenLeft, DeviceError):
            return None

    def _rows(self, latest: LogitsRow) -> DraftRows:
        """The latest row, which follows all draft tokens so far and, when drafting ahead, those of the guess."""
        return DraftRows(lambda _: latest, self.request.sampler, Draft(self._token_ids), self._guessed)

    def _draw(self, rows: DraftRows, i: int, count: int) -> list[tuple[int, Distribution | None]]:
        request = self.request
        position = len(request.sequence) + len(self._guessed)
        if count == 1:
            return [request.verifier.draw(rows, i, request.noise, position)]
        return [*request.verifier.draw_several(rows, i, request.noise, position, count)]

    @property
    def _draws_branches(self) -> bool:
        """Whether second candidates may be worth their rows."""
        rule = self.request.rule
        return self.request.trees and rule is not None and rule.wants_branches

    @property
    def _is_unfinished(self) -> bool:
        """Whether another token may follow: not before the prompt is read, nor after an end-of-sequence token."""
        request, token_ids = self.request, self._token_ids
        unfinished = 0 < len(token_ids) < request.limit and bool(self.unread)
        return unfinished and token_ids[-1] not in request.eos_token_ids and self._may_go_on

    @property
    def _may_go_on(self) -> bool:
        rule = self.request.rule
        return rule is None or rule.wants_more(self._confidences)

    @property
    def draft(self) -> Draft:
        """The chosen tokens, in the main model's ids."""
        chain = Draft(self._token_ids, self._probs or None, self._confidences or None)
        rule = self.request.rule
        # Which candidates they are does not decide whether they are proposed: that would bias sampling.
        places = rule.branch_places(self._confidences) if rule and any(self._branches) else []
        return _with_branches(chain, [(i, second) for i in places if (second := self._branches[i])])

    def _confidence(self, latest: LogitsRow, drawn: Distribution | None, token_id: int) -> float:
        """A chosen token's probability: in draft_probs if they were computed, otherwise in the model's softmax."""
        return drawn.prob(token_id) if drawn else probability(latest, token_id)

    def _clear(self) -> None:
        self._guessed, self._token_ids, self._probs, self._confidences = [], [], [], []
        self._runners_up, self._branches = [], []


def _with_branches(chain: Draft, branches: Sequence[tuple[int, tuple[int, Distribution | None]]]) -> Draft:
    """A chain with second candidates at some of its places."""
    if not branches:
        return chain
    token_ids, parents = [*chain.token_ids], [*range(-1, len(chain) - 1)]
    probs, confidences = [*(chain.probs or [])], [*(chain.confidences or [])]
    for place, (token_id, drawn) in branches:
        token_ids.append(token_id)
        parents.append(place - 1)
        if drawn:
            probs.append(drawn)
        confidences.append(0.0)  # what they are worth is known from others; see `Record`
    return Draft(token_ids, probs or None, confidences, parents)
