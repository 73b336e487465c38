"""Reads answers again as parts of prompts, while an engine has nothing else to do.

Where the rows of answers are read alone (`RowRule.separate`), their keys and values have other bits than those of a
prompt. The next turn of a conversation has the answer in its prompt. To be found in the prefix cache then, it is read a
second time, in the way of prompts, before that turn comes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from outrider.types import Backend, Chunk, Prompt, Slot, TokenSequence, undivided

log = logging.getLogger("outrider")

_PIECE_TOKENS = 32  # tokens per call: a request that comes meanwhile waits for one call
_MAX_TEXTS = 8  # texts that wait


class Rereading:
    """The texts that are to be read again, on one main model: an `IdleJob`."""

    def __init__(self) -> None:
        self._texts: deque[Prompt] = deque(maxlen=_MAX_TEXTS)
        self._slot: Slot | None = None  # of the first text

    @property
    def is_due(self) -> bool:
        """Whether there is something to read."""
        return bool(self._texts)

    @property
    def has_begun(self) -> bool:
        """Whether a text is partly read, in a slot that is still open."""
        return self._slot is not None

    def add(self, sequence: TokenSequence) -> None:
        """Read an ended answer later. Not one whose prompt has marked answers: its next turn will have, too."""
        if len(sequence) > sequence.num_prompt_tokens and not sequence.answers:
            self.pause()
            read = sequence.token_ids[:-1]  # the last token was not read the first time either
            self._texts.append(Prompt(read, sequence.scope, sequence.embeds, counted=False, adapter=sequence.adapter))

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Read the next piece of the first text. Gives up a text that has no room in the cache."""
        token_ids = self._texts[0].token_ids
        try:
            if self._slot is None:
                self._slot = main.open(len(token_ids), self._texts[0])
            if self._slot is not None:
                begin = self._slot.length
                end = undivided(self._texts[0].embeds, begin, begin + _PIECE_TOKENS)
                main.submit([Chunk(self._slot, token_ids[begin:end], num_rows=0)]).wait()
        except Exception as error:  # requests are not affected: they read what is not in the cache
            log.warning("An answer could not be read again: %r", error)
            slot, self._slot = self._slot, None
            if slot is not None:
                slot.close()
        if self._slot is None or self._slot.length == len(token_ids):
            self.pause()
            self._texts.popleft()

    def pause(self) -> None:
        """Publish what was read, or warn if that fails. The rest is read later."""
        slot, self._slot = self._slot, None
        if slot is not None:
            try:
                slot.publish(self._texts[0].token_ids)
            except Exception as error:
                log.warning("What was read again of an answer could not be published: %r", error)
            finally:
                slot.close()
