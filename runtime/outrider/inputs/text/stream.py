"""Text from tokens, as they are generated."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

_MOST_BYTES_BEGUN = 3  # of a character in UTF-8 that is not complete


def num_held(text: str, marker: str, *, whole: bool = False) -> int:
    """The most characters at the end of a text that may be the beginning of a marker, or all of it if `whole`."""
    sizes = range(min(len(marker) - (not whole), len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class StopStrings:
    """Finds stop strings in a text that comes piece by piece.

        stops = StopStrings(["END", "\\n\\n"])
        stops.push("xEN"), stops.num_held    # 0, 2: no stop string yet; "EN" may be the beginning of one
        stops.push("D!")                     # 4: the stop string begins 4 characters from the end

    Takes time linear in the text, for any number and length of stop strings, by the automaton of Aho and Corasick 1975,
    "Efficient string matching: an aid to bibliographic search". A state is made when the text first needs it, so the
    length of stop strings beyond the text's costs nothing.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = sorted(set(stop))  # those with a common beginning are neighbours
        self._root = self._state = _State(0, 0, len(self._stop))

    @property
    def num_held(self) -> int:
        """The most characters at the end of the text that may begin a stop string."""
        return self._state.depth

    def restart(self) -> None:
        """Forget the text: a stop string does not begin in it."""
        self._state = self._root

    def push(self, text: str) -> int:
        """Add text. If a stop string ends in it, returns how many characters before the end it begins; otherwise 0.

        If several end in it, the one that begins first counts. It may begin in an earlier piece.
        """
        begin = len(text)
        for end, character in enumerate(text, 1):
            self._state = self._follow(self._state, character)
            if self._state.num_complete:
                begin = min(begin, end - self._state.num_complete)
        return len(text) - begin

    def _follow(self, state: _State, character: str) -> _State:
        """The state after this one and a character.

        Missing states are made. Each has the next one as its `fallback`.
        """
        made: list[_State] = []
        while True:
            found = state.next.get(character)
            if found is not None:
                break
            if new := self._extended(state, character):
                made.append(new)
                state.next[character] = new
            if state is self._root:
                found = self._root
                break
            state = state.fallback or self._root
        for fallback, new in pairwise([found, *reversed(made)]):
            new.fallback = fallback
            new.num_complete = new.num_complete or fallback.num_complete
        return made[0] if made else found

    def _extended(self, state: _State, character: str) -> _State | None:
        """The state for this one's text plus a character, if a stop string begins with that."""

        def next_character(stop: str) -> str:
            return stop[state.depth : state.depth + 1]

        first = bisect_left(self._stop, character, state.first, state.last, key=next_character)
        last = bisect_right(self._stop, character, first, state.last, key=next_character)
        if first == last:
            return None
        depth = state.depth + 1
        return _State(depth, first, last, depth if len(self._stop[first]) == depth else 0)


class _State:
    """The longest end of the text that a stop string begins with.

    depth: its characters. first, last: the range of stop strings that begin with it. num_complete: characters of the
    longest stop string that the text ends with, or 0. fallback: the state of the next shorter end.
    """

    __slots__ = ("depth", "fallback", "first", "last", "next", "num_complete")

    def __init__(self, depth: int, first: int, last: int, num_complete: int = 0) -> None:
        self.depth, self.first, self.last, self.num_complete = depth, first, last, num_complete
        self.fallback: _State | None = None
        self.next: dict[str, _State] = {}


class ContentFinder(Protocol):
    """Tells the answer itself from reasoning: `outrider.inputs.reasoning` has them."""

    content: list[tuple[int, int]]  # where it is in the text: (begin, end) of each part

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text of which it is not known yet what they are."""

    def push(self, text: str) -> Sequence[object]:
        """Add text. Returns pieces; those of the answer itself are texts."""

    def finish(self) -> Sequence[object]:
        """The same for what was held back, as no text follows."""


class TextStream:
    """Turns one answer's tokens into a text that only grows, by whole characters.

        stream = TextStream(tokenizer.decode, stop=("\\n\\n",))
        stream.push([token_id])
        stream.text                # what is certain now
        stream.finish()            # no token follows: what was held back is certain too

    The final text is `decode(all tokens)`, cut before the first stop string, and before a character that is incomplete
    where an answer is cut. Bytes of an incomplete character, and text that may begin a stop string, are held back.

    A token's text depends on its neighbours (the space before a word, the bytes of one character), so a window of
    tokens is decoded together. It moves as the answer grows, and always starts some tokens back, as in Hugging Face
    TGI's `decode_token`. at_once: the text is read only at the end, so that it is decoded once if nothing in it can end
    the answer.

    until: is given each new text, and says whether the answer ends with it. stop_token_ids: tokens that end it.
    reasoning: `until`, stop strings and these tokens do not count within it, nor within its markers.
    """

    _WINDOW = 32  # tokens; decoding costs the same for one as for these

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        *,
        until: Callable[[str], bool] | None = None,
        at_once: bool = False,
        reasoning: ContentFinder | None = None,
    ) -> None:
        self.stop = tuple(stop)
        # Whether tokens are to be pushed one by one
        self.stepwise = bool(stop) or until is not None or bool(stop_token_ids)
        self._until, self._stop_token_ids = until, frozenset(stop_token_ids)
        self._reasoning = reasoning if self.stepwise else None
        self._at_once = at_once and not self.stepwise
        self.stopped = False  # whether a stop string came up
        self.stop_string: str | None = None  # the one that did
        self.is_over = False  # whether it did, or `until` has seen the end, or one of the tokens that end it came
        self._decode = decode
        self._token_ids: list[int] = []
        self._start = 0  # where the window starts
        self._shown = 0  # tokens whose text has been taken
        self._known = ""  # the text of those of them that are in the window
        self._text = ""  # all text that has been taken
        self._certain = 0  # characters of it that cannot become part of a stop string
        self._stops = StopStrings(self.stop)
        self._part = self._searched = 0  # how far stop strings were looked for: part of the answer itself, characters
        self._ends: list[tuple[int, int]] = []  # (tokens, characters) taken after each step

    @property
    def text(self) -> str:
        """The text that is certain."""
        return self._text[: self._certain]

    @property
    def num_tokens(self) -> int:
        """Tokens before the stop string; all tokens without one."""
        if not self.stopped:
            return len(self._token_ids)
        # Start at the first step whose text goes beyond. Each try decodes a token with all before it.
        count, _ = self._ends[bisect_right(self._ends, len(self._text), key=lambda end: end[1])]
        while len(self._decode(self._token_ids[:count])) > len(self._text):
            count -= 1
        return count

    @property
    def num_certain_tokens(self) -> int:
        """Tokens whose text is certain; not those of an incomplete character, or of what may begin a stop string."""
        if not self.stop:
            return self._shown
        at = bisect_right(self._ends, self._certain, key=lambda end: end[1])
        return self._ends[at - 1][0] if at else 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Add tokens.

        Where `stepwise` is set, push tokens one by one: `is_over` then tells which of them ended the answer.
        """
        self._token_ids.extend(token_ids)
        if self._at_once:
            return
        size = len(self._text)
        text = self._decode(self._token_ids[self._start :])
        # An incomplete character decodes to U+FFFD or to nothing, depending on the tokenizer.
        if len(text) > len(self._known) and text.startswith(self._known) and not text.endswith("\ufffd"):
            self._take(text)
        if not (self.stopped or self._stop_token_ids.isdisjoint(token_ids) or self._is_reasoning):
            is_blank = self._reasoning is not None and not self._reasoning.content  # between reasoning and answer
            self.is_over = self.is_over or not is_blank or len(self._text) == size
        self._certain = len(self._text) - (0 if self.stopped else self._num_held)

    @property
    def _is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def _num_held(self) -> int:
        """Characters at the end that may belong to a stop string."""
        return self._stops.num_held + (self._reasoning.num_held if self._reasoning and self.stop else 0)

    def finish(self, *, cut: bool = False) -> None:
        """Add what was held back, as no token follows.

        cut: something ended the answer before the model did. The bytes of a character that it had begun are no text.
        """
        if not self.stopped:
            text = self._decode(self._token_ids[self._start :])
            if cut:
                whole = text.rstrip("\ufffd")  # which a decoder may write for each of up to three bytes
                text = text[: max(len(whole), len(self._known), len(text) - _MOST_BYTES_BEGUN)]
            self._take(text)
        if self._reasoning is not None and not self.stopped:
            self._reasoning.finish()
            self._search()
        self._certain = len(self._text)

    def _take(self, text: str) -> None:
        """Accept the window's text, up to the first stop string."""
        new = text[len(self._known) :]
        self._text += new
        if len(self._token_ids) - self._start > self._WINDOW:
            self._start = self._shown
            text = self._decode(self._token_ids[self._start :])
        self._known, self._shown = text, len(self._token_ids)
        said = new
        if self._reasoning is not None:
            said = "".join(piece for piece in self._reasoning.push(new) if isinstance(piece, str))
        if self._until is not None and said and self._until(said):
            self.is_over = True
        if self.stop:
            self._ends.append((self._shown, len(self._text)))
            self._search()

    def _search(self) -> None:
        """Cut the text before the first stop string in what is new of the answer itself."""
        parts = [(0, len(self._text))] if self._reasoning is None else self._reasoning.content
        for number, (begin, end) in enumerate(parts[self._part :], self._part):
            if number > self._part:
                self._stops.restart()
            begin = max(begin, self._searched)
            self._part, self._searched = number, end
            if found := self._stops.push(self._text[begin:end]):
                ended = self._text[end - found : end]
                self.stop_string = max(filter(ended.startswith, self.stop), key=len, default=None)
                self._text = self._text[: end - found]
                self.stopped = self.is_over = True
                return
