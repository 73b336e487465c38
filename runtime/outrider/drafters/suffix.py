"""Drafts copied from the context and from other texts, cut where acceptance becomes unlikely."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.drafters.references import MAX_TOKENS, References
from outrider.drafters.suffix_automaton import Followers, SuffixAutomaton
from outrider.types import Committed, Copier, Draft, DraftRequest, TokenSequence

LONGEST_CONTEXT = 3  # tokens; a longer one hardly ever comes back in another text
_NUM_PLACES = 1 << 16  # 1 MB
_DOUBT = 12.0  # a context of n tokens counts as much as _DOUBT / n contradictions


class NextTokens:
    """A table of the main model's latest next tokens, by the last one to three tokens before them.

        table = NextTokens()
        table.add([4, 7], 9)
        table.guess([1, 4, 7])    # 9, and its chance

    Contexts share a table of fixed size by their hashes; a newer one takes the place of an older. It is kept in memory
    only.

    Source: Luo et al. 2024, "Turning trash into treasure: accelerating inference of large language models with token
    recycling". There the table has several candidates after each single token, also after rejected ones. Here longer
    contexts come first, which are right more often, and one candidate is kept: more did not pay for their rows.
    """

    def __init__(self) -> None:
        # Single numbers of an `array` are read and written several times as fast as NumPy's.
        self._hashes = array("q", bytes(8 * _NUM_PLACES))
        self._token_ids = array("i", bytes(4 * _NUM_PLACES))
        self.forget()

    def forget(self) -> None:
        """Begin with an empty table."""
        self._times = array("i", bytes(4 * _NUM_PLACES))  # in a row; 0: the place is free

    def add(self, context: Sequence[int], token_id: int) -> None:
        """Take in that `token_id` came after these tokens, of which the last ones count."""
        for length in range(1, min(len(context), LONGEST_CONTEXT) + 1):
            at, key = _place(context, length)
            is_same = self._hashes[at] == key and self._token_ids[at] == token_id
            self._times[at] = self._times[at] + 1 if is_same else 1
            self._hashes[at], self._token_ids[at] = key, token_id

    def guess(self, context: Sequence[int]) -> tuple[int, float]:
        """The latest token after the longest known end of the context, and its chance; chance 0 if none is known."""
        for length in range(min(len(context), LONGEST_CONTEXT), 0, -1):
            at, key = _place(context, length)
            times = self._times[at]
            if times and self._hashes[at] == key:
                return self._token_ids[at], times / (times + _DOUBT / length)
        return 0, 0.0


def _place(context: Sequence[int], length: int) -> tuple[int, int]:
    """Where the last `length` tokens are in the table, and their hash, which does not depend on the process."""
    key = hash(tuple(context[-length:]))
    return key % _NUM_PLACES, key


_MAX_COPY_CHANCE = 0.95  # highest chance of a copied token
MOST_INDEXED = 2048  # tokens that one call of `propose` adds to indexes; some 4 µs each, for which all answers wait
_LEAST_INDEXED = 64  # of each sequence; more than a round commits
_NUM_ORDERS = 4  # contexts, ever shorter, that a chance is blended from; shorter ones add little


class Suffix(Copier):
    """Proposes the most frequent continuation of the longest suffix of the context that occurred before.

        Suffix([References([tokenizer.encode(document)])])

    Searches the context, `references` and the sequence's references, token by token, and takes the likeliest
    continuation; among equals the context's. A copy that reaches the end of the context continues with its own
    beginning. Where there is little to copy, it proposes what the main model last said after the same tokens, in this
    answer or an earlier one. A draft ends where the chance that all of it is accepted falls to `min_chance`. No model
    is called. A prompt is indexed as the main model reads it; what the prefix cache had of it follows in pieces, one in
    each round, and nothing is copied from the context before it is whole.

    Source: Oliaro et al. 2024, "SuffixDecoding" (frequencies decide how far to draft); Hu et al. 2024, "SAM Decoding"
    (a suffix automaton of the context beside one of other texts; here, these have a suffix array). A token's chance is
    blended from contexts of several lengths, as in prediction by partial matching (Cleary and Witten 1984).
    """

    name = "suffix"
    num_assistant_tokens = 10

    def __init__(self, references: Sequence[References] = (), min_chance: float = 0.02) -> None:
        self.references = tuple(references)
        self.min_chance = min_chance
        self._indexes: dict[TokenSequence, SuffixAutomaton] = {}
        self._next_tokens = NextTokens()
        self._own_next_tokens: dict[TokenSequence, NextTokens] = {}  # of those that take nothing from earlier answers

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """Start an index. There is always room for one."""
        self._indexes[sequence] = SuffixAutomaton()
        if not sequence.earlier_answers:
            self._own_next_tokens[sequence] = NextTokens()
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, with confidences; empty without a match."""
        left = MOST_INDEXED
        for request in requests:
            left -= self._index(request.sequence, max(left, _LEAST_INDEXED))
        return [self._propose_one(request) for request in requests]

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Index as many tokens of the prompt as the main model has read. Those of the answer follow in `propose`."""
        if self._indexes[sequence].num_tokens < sequence.num_prompt_tokens:
            self._index(sequence, len(committed.token_ids))

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's index."""
        if index := self._indexes.pop(sequence, None):
            self._learn(sequence, range(index.num_tokens, len(sequence)))
            self._own_next_tokens.pop(sequence, None)

    def forget(self) -> None:
        """Forget what earlier answers said. For measurements, which repeat prompts."""
        self._next_tokens.forget()

    def _index(self, sequence: TokenSequence, most: int) -> int:
        """Add up to `most` new tokens to a sequence's index. Returns how many."""
        index, token_ids = self._indexes[sequence], sequence.token_ids
        new = range(index.num_tokens, min(index.num_tokens + most, len(token_ids)))
        self._learn(sequence, new)
        for i in new:
            index.append(token_ids[i])
        return len(new)

    def _learn(self, sequence: TokenSequence, positions: range) -> None:
        """Take in what the main model has said at these positions."""
        token_ids = sequence.token_ids
        next_tokens = self._own_next_tokens.get(sequence, self._next_tokens)
        for i in range(max(positions.start, sequence.num_prompt_tokens), positions.stop):
            next_tokens.add(token_ids[max(i - LONGEST_CONTEXT, 0) : i], token_ids[i])

    def _sources(self, request: DraftRequest) -> list[_Own | _Other | _Said]:
        """Where the next draft tokens may come from; of equals the first wins."""
        index, context = self._indexes[request.sequence], request.sequence.token_ids
        references = (*self.references, *request.sequence.references)
        others = [_Other(each, context) for each in references]
        own = [_Own(index)] if index.num_tokens == len(context) else []
        return [*own, *others, _Said(self._own_next_tokens.get(request.sequence, self._next_tokens), context)]

    def _propose_one(self, request: DraftRequest) -> Draft:
        """Tokens that are each the likeliest of the sources'."""
        sources = self._sources(request)
        token_ids: list[int] = []
        confidences: list[float] = []
        all_accepted, rule = 1.0, request.rule
        while len(token_ids) < request.limit and (not rule or not token_ids or rule.wants_more(confidences)):
            token_id, chance = max((source.guess() for source in sources), key=lambda guess: guess[1])
            all_accepted *= chance
            if all_accepted <= self.min_chance:
                break
            token_ids.append(token_id)
            confidences.append(chance)
            if token_id in request.eos_token_ids:
                break
            for source in sources:
                source.take(token_id)
        return Draft(token_ids, confidences=confidences)


class _Own:
    """The context as a source of candidates for the next draft token."""

    def __init__(self, index: SuffixAutomaton) -> None:
        self._index, self._match = index, index.longest

    def guess(self) -> tuple[int, float]:
        """A candidate and its chance of acceptance; chance 0 without a match."""
        index, match = self._index, self._match
        token_id: int | None = None
        chance, reached = 0.0, 1.0
        for _ in range(_NUM_ORDERS):
            if not match.length:
                break
            followers, shorter = index.followers(match, token_id), index.shorter(match)
            escape = _escape(followers, match.length - shorter.length)
            chance += reached * (1 - escape) * followers.times / followers.total
            token_id, reached, match = followers.token_id, reached * escape, shorter
        return token_id or 0, min(chance, _MAX_COPY_CHANCE)

    def take(self, token_id: int) -> None:
        """Append a token of the draft."""
        self._match = self._index.walk(self._match, token_id)


class _Other:
    """Other texts as a source of candidates."""

    def __init__(self, references: References, context: Sequence[int]) -> None:
        self._references, self._context = references, list(context[-MAX_TOKENS:])
        self._match = references.find(self._context)

    def guess(self) -> tuple[int, float]:
        """A candidate and its chance of acceptance; chance 0 without a match."""
        if not self._match:
            return 0, 0.0
        followers = self._references.followers(self._match)
        chance = (1 - _escape(followers, self._match.length)) * followers.times / followers.total
        return followers.token_id, min(chance, _MAX_COPY_CHANCE)

    def take(self, token_id: int) -> None:
        """Append a token of the draft."""
        self._context.append(token_id)
        longer = self._references.extend(self._match, token_id) if self._match else None
        self._match = longer or self._references.find(self._context)


class _Said:
    """What the main model has said after the same tokens as a source of candidates."""

    def __init__(self, next_tokens: NextTokens, context: Sequence[int]) -> None:
        self._next_tokens, self._context = next_tokens, list(context[-LONGEST_CONTEXT:])

    def guess(self) -> tuple[int, float]:
        """A candidate and its chance of acceptance; chance 0 if nothing is known."""
        token_id, chance = self._next_tokens.guess(self._context)
        return token_id, min(chance, _MAX_COPY_CHANCE)

    def take(self, token_id: int) -> None:
        """Append a token of the draft."""
        self._context.append(token_id)


def _escape(followers: Followers, num_lengths: int) -> float:
    """The probability of an escape: the next token is none of the context's followers, and shorter contexts decide.

    Each of the `num_lengths` lengths at which the context had these followers escapes with num_distinct / (num_distinct
    + total / 2). That is method C of Witten and Bell 1991, "The zero-frequency problem", with observations counted
    half: a match of n tokens that occurred once is right with a chance of 1 − (2 / 3)^n, as in language models' texts.
    """
    return (2 * followers.num_distinct / (2 * followers.num_distinct + followers.total)) ** num_lengths
