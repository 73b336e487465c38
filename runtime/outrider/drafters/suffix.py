"""Drafts copied from the context and from other texts, as far as the copy is likely to be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.drafters.copier import Copier
from outrider.drafters.references import MAX_TOKENS
from outrider.drafters.suffix_automaton import SuffixAutomaton
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.drafters.references import References
    from outrider.drafters.suffix_automaton import Followers
    from outrider.types import DraftRequest, Sequence

_SURE = 0.95  # no copy is surer than this
_NUM_ORDERS = 4  # ever shorter contexts that are asked for a chance; what is left for others is little


class Suffix(Copier):
    """Proposes what most often followed the longest end of the context that stood somewhere before.

        Suffix([References([tokenizer.encode(document)])])

    Looks in the context itself, in `references` and in those of the sequence, token by token, and takes the likelier
    continuation; the context's own among equals. A copy that reaches the end of the context goes on with its own
    beginning. A draft ends where the chance that all of it is kept falls to `min_chance`. Costs no model call.

    Source: Oliaro et al. 2024, "SuffixDecoding" (frequencies decide how far to draft); Hu et al. 2024, "SAM Decoding"
    (a suffix automaton of the context beside one of other texts; here, these have a suffix array). A token's chance is
    blended from contexts of several lengths, as in prediction by partial matching (Cleary and Witten 1984).
    """

    num_assistant_tokens = 10

    def __init__(self, references: Seq[References] = (), min_chance: float = 0.02) -> None:
        self.references = tuple(references)
        self.min_chance = min_chance
        self._indexes: dict[Sequence, SuffixAutomaton] = {}

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """Start an index; there is always room for one."""
        self._indexes[sequence] = SuffixAutomaton()
        return True

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft for each request, with confidences; empty where nothing matches."""
        return [self._propose_one(request) for request in requests]

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._indexes.pop(sequence, None)

    def _propose_one(self, request: DraftRequest) -> Draft:
        index, context = self._indexes[request.sequence], request.sequence.token_ids
        for token_id in context[index.num_tokens :]:
            index.append(token_id)
        references = (*self.references, *request.sequence.references)
        sources: list[_Own | _Other] = [_Own(index), *(_Other(each, context) for each in references)]
        token_ids: list[int] = []
        confidences: list[float] = []
        all_kept = 1.0
        while len(token_ids) < request.limit:
            token_id, chance = max((source.guess() for source in sources), key=lambda guess: guess[1])
            all_kept *= chance
            if all_kept <= self.min_chance:
                break
            token_ids.append(token_id)
            confidences.append(chance)
            if token_id in request.eos_token_ids:
                break
            for source in sources:
                source.take(token_id)
        return Draft(token_ids, confidences=confidences)


class _Own:
    """The context as a source: what it says comes next, after the draft so far."""

    def __init__(self, index: SuffixAutomaton) -> None:
        self._index, self._place = index, index.longest

    def guess(self) -> tuple[int, float]:
        """A token and its chance to be kept; 0 where nothing matches."""
        index, place = self._index, self._place
        token_id: int | None = None
        chance, reached = 0.0, 1.0
        for _ in range(_NUM_ORDERS):
            if not place.length:
                break
            followers, shorter = index.followers(place, token_id), index.shorter(place)
            escape = _escape(followers, place.length - shorter.length)
            chance += reached * (1 - escape) * followers.times / followers.total
            token_id, reached, place = followers.token_id, reached * escape, shorter
        return token_id or 0, min(chance, _SURE)

    def take(self, token_id: int) -> None:
        """Go on behind a token of the draft."""
        self._place = self._index.walk(self._place, token_id)


class _Other:
    """Other texts as a source."""

    def __init__(self, references: References, context: Seq[int]) -> None:
        self._references, self._context = references, list(context[-MAX_TOKENS:])
        self._match = references.find(self._context)

    def guess(self) -> tuple[int, float]:
        """A token and its chance to be kept; 0 where nothing matches."""
        if not self._match:
            return 0, 0.0
        followers = self._references.followers(self._match)
        chance = (1 - _escape(followers, self._match.length)) * followers.times / followers.total
        return followers.token_id, min(chance, _SURE)

    def take(self, token_id: int) -> None:
        """Go on behind a token of the draft."""
        self._context.append(token_id)
        longer = self._references.extend(self._match, token_id) if self._match else None
        self._match = longer or self._references.find(self._context)


def _escape(followers: Followers, num_lengths: int) -> float:
    """The chance that a context does not tell what comes next, and shorter ones have to.

    Each of the `num_lengths` lengths at which the context had these followers escapes with num_distinct /
    (num_distinct + total / 2). That is method C of Witten and Bell 1991, "The zero-frequency problem", with what was
    seen counted half: a part of n tokens that stood once before is right with a chance of 1 − (2 / 3)^n, as in texts of
    language models.
    """
    return (2 * followers.num_distinct / (2 * followers.num_distinct + followers.total)) ** num_lengths
