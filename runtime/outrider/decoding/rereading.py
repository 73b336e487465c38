"""Reads answers again as parts of prompts, while an engine has nothing else to do.

Where the rows of answers are read alone (`RowRule.separate`), their keys and values have other bits than those of a
prompt. The next turn of a conversation has the answer in its prompt. To be found in the prefix cache then, it is read a
second time, in the way of prompts, before that turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing

from outrider.decoding.idle import IdleJob, harmless
from outrider.types import Backend, Chunk, Prompt, Slot, TokenSequence, undivided

_PIECE_TOKENS = 32  # tokens per call: a request that comes meanwhile waits for one call
_MAX_TEXTS = 8  # texts that wait


class Rereading(IdleJob):
    """The texts that are to be read again, on one main model."""

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
        with harmless("An answer could not be read again"):  # requests read what is not in the cache
            if self._read(main):
                return
            self.pause()
        slot, self._slot = self._slot, None  # after a failure
        if slot is not None:
            slot.close()
        self._texts.popleft()

    def _read(self, main: Backend) -> bool:
        """Read the next piece. Whether there is more to read, and room for it."""
        text = self._texts[0]
        if self._slot is None:
            self._slot = main.open(len(text.token_ids), text)
        if self._slot is None:
            return False
        begin = self._slot.length
        end = undivided(text.embeds, begin, begin + _PIECE_TOKENS)
        main.submit([Chunk(self._slot, text.token_ids[begin:end], num_rows=0)]).wait()
        return self._slot.length < len(text.token_ids)

    def pause(self) -> None:
        """Publish what was read, or warn if that fails. The rest is read later."""
        slot, self._slot = self._slot, None
        if slot is not None:
            with harmless("What was read again of an answer could not be published"), closing(slot):
                slot.publish(self._texts[0].token_ids)
