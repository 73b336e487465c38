"""Text from tokens, as they are generated."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from outrider.inputs.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq


class TextStream:
    """Turns one answer's tokens into a text that only grows, by whole characters.

        stream = TextStream(tokenizer.decode, stop=("\\n\\n",))
        stream.push([token_id])
        stream.text                # what is certain now
        stream.finish()            # no token follows: what was held back is certain too

    The final text is `decode(all tokens)`, cut before the first stop string. Bytes of an incomplete character, and text
    that may begin a stop string, are held back.

    A token's text depends on its neighbours (the space before a word, the bytes of one character), so a window of
    tokens is decoded together. It moves as the answer grows, and always starts some tokens back, as in Hugging Face
    TGI's `decode_token`. until: is given each new text, and says whether the answer ends with it. at_once: the text is
    read only at the end, so that it is decoded once if nothing in it can end the answer.
    """

    _WINDOW = 32  # tokens; decoding costs the same for one as for these

    def __init__(
        self,
        decode: Callable[[Seq[int]], str],
        stop: Seq[str] = (),
        *,
        until: Callable[[str], bool] | None = None,
        at_once: bool = False,
    ) -> None:
        self.stop = tuple(stop)
        self.stepwise = bool(stop) or until is not None  # whether tokens are to be pushed one by one
        self._until = until
        self._at_once = at_once and not self.stepwise
        self.stopped = False  # whether a stop string came up
        self.is_over = False  # whether it did, or `until` has seen the end
        self._decode = decode
        self._token_ids: list[int] = []
        self._start = 0  # where the window starts
        self._shown = 0  # tokens whose text has been taken
        self._known = ""  # the text of those of them that are in the window
        self._text = ""  # all text that has been taken
        self._certain = 0  # characters of it that cannot become part of a stop string
        self._stops = StopStrings(self.stop)
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

    def push(self, token_ids: Seq[int]) -> None:
        """Add tokens.

        Where `stepwise` is set, push tokens one by one: `is_over` then tells which of them ended the answer.
        """
        self._token_ids.extend(token_ids)
        if self._at_once:
            return
        text = self._decode(self._token_ids[self._start :])
        # An incomplete character decodes to U+FFFD or to nothing, depending on the tokenizer.
        if len(text) > len(self._known) and text.startswith(self._known) and not text.endswith("\ufffd"):
            self._take(text)
        self._certain = len(self._text) - (0 if self.stopped else self._stops.num_held)

    def finish(self) -> None:
        """Add what was held back, as no token follows."""
        if not self.stopped:
            self._take(self._decode(self._token_ids[self._start :]))
        self._certain = len(self._text)

    def _take(self, text: str) -> None:
        """Accept the window's text, up to the first stop string."""
        new = text[len(self._known) :]
        self._text += new
        if len(self._token_ids) - self._start > self._WINDOW:
            self._start = self._shown
            text = self._decode(self._token_ids[self._start :])
        self._known, self._shown = text, len(self._token_ids)
        if self._until is not None and self._until(new):
            self.is_over = True
        if not self.stop:
            return
        self._ends.append((self._shown, len(self._text)))
        if found := self._stops.push(new):
            self._text = self._text[:-found]
            self.stopped = self.is_over = True
