"""The state of one answer in its grammar."""

from __future__ import annotations

import logging
import re
import time
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import NoTokenLeft, one_line
from outrider.system.guard import is_interrupt
from outrider.tokens.grammar.limits import GrammarLimits
from outrider.types import Draft, Logits, num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from llguidance import LLExecutor, LLMatcher
    from numpy.typing import NDArray


_LONGEST_CHARACTERS = 160  # characters
_QUICK_SECONDS = 0.02  # of a mask; what takes longer is timed


def first_line(message: str) -> str:
    """The gist of a message: its first line without the position, and what a parser of regular expressions adds."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["it gives no reason"]
    told = re.sub(r"^at \d+\(\d+\): ", "", lines[0]).rstrip(":")
    added = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return " ".join(filter(None, (told, added)))[:_LONGEST_CHARACTERS].rstrip(". ")


log = logging.getLogger("outrider")


class GrammarState:
    """Masks the rows of one answer, and knows the tokens that its grammar forces. A processor of logits.

    The matcher comes after the committed tokens and those of the draft that were looked at last. For another prefix
    it is rolled back to what both share. Masks are kept until other tokens are committed.

    base: the compiled grammar, which is copied. executor: fills masks of several answers at the same time. option: the
    option that the grammar comes from, for errors. limits: of masks.
    """

    def __init__(
        self,
        base: LLMatcher,
        executor: LLExecutor,
        vocab_size: int,
        eos_token_ids: Collection[int],
        option: str,
        *,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._seconds = 0.0  # of processor time, for its masks
        self._limit = ""  # the one that it has passed: nothing more is asked of the matcher
        self.is_timed = False  # whether its masks are computed one by one, as one of them may be slow
        self.executor, self.vocab_size = executor, vocab_size
        self.matcher, self._base = base.deep_copy(), base
        self._eos_token_ids, self._option = [*eos_token_ids], option
        self._committed: list[int] = []
        self._ahead: list[int] = []  # tokens after the committed ones that the matcher has consumed
        self._masks: dict[tuple[int, ...], NDArray[np.uint32]] = {}  # by the tokens after the committed ones

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move after committed tokens. Rejected ones leave no trace."""
        count, new = self._move(token_ids), tuple(token_ids)
        self._committed += self._ahead
        self._ahead = []
        is_kept = count == len(new)  # else the answer has ended, or the matcher has failed
        if self.matcher.is_error():
            self._limit = self._error()
        masks = self._masks.items() if is_kept else ()
        self._masks = {prefix[count:]: mask for prefix, mask in masks if prefix[:count] == new}

    def _charge(self, seconds: float, row: int) -> None:
        """Count processor time for a mask. Raises NoTokenLeft beyond a limit."""
        self._seconds += seconds
        limits, took = self._limits, "finding the tokens that may come next took"
        if seconds > limits.mask_seconds:
            self._limit = f"{took} {seconds:.1f} seconds, and the limit of a token is {limits.mask_seconds:g}"
        elif self._seconds > limits.answer_seconds:
            self._limit = f"{took} {self._seconds:.1f} seconds in all, and the limit of an answer is "
            self._limit += f"{limits.answer_seconds:g}"
        self._check_limits(row)

    def _check_limits(self, row: int) -> None:
        if self._limit:
            raise NoTokenLeft(f"{self._option} cannot be followed further: {self._limit}. Simplify it.", row=row)

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Ban, in place, tokens that the grammar does not allow. `prefix` follows the committed tokens.

        Raises:
            NoTokenLeft: when the grammar is too complex to be followed here.
        """
        allowed = _unpack(self._mask(prefix), self.vocab_size)
        logits[: self.vocab_size][~allowed[: len(logits)]] = -np.inf
        logits[self.vocab_size :] = -np.inf

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens after `prefix`, as long as the grammar allows only one."""
        if self._move(prefix) < len(prefix):
            return []
        return self.matcher.compute_ff_tokens()[:most]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the first on, the grammar allows after the committed tokens."""
        self._move(())
        return self.matcher.validate_tokens([*token_ids])

    def num_until_complete(self, token_ids: Sequence[int]) -> int:
        """How many of these may be committed: up to the one that completes the grammar, or all."""
        counts = range(1, len(token_ids))
        return next((count for count in counts if self.is_complete(token_ids[:count])), len(token_ids))

    def is_complete(self, prefix: Sequence[int] = ()) -> bool:
        """Whether nothing but the end of the answer may follow `prefix`."""
        if self._move(prefix) < len(prefix) or not self.matcher.is_accepting():
            return False
        allowed = _unpack(self._mask(prefix), self.vocab_size)
        allowed[self._eos_token_ids] = False
        return not allowed.any()

    def missing(self, draft: Draft) -> list[int] | None:
        """The tokens of the draft's first chain that masks are needed after, row by row; None if all are known."""
        token_ids = draft.first_chain.token_ids
        token_ids = token_ids[: self.num_allowed(token_ids)]
        end = next((i for i, token_id in enumerate(token_ids) if token_id in self._eos_token_ids), len(token_ids))
        token_ids = token_ids[:end]
        known = all(tuple(token_ids[:count]) in self._masks for count in range(end + 1))
        return None if known else token_ids

    def time_masks(self, draft: Draft) -> None:
        """Compute the masks for a draft's first chain one by one, until one is found to be slow."""
        token_ids = self.missing(draft) or []
        self.is_timed = False
        for count in range(len(token_ids) + 1):
            if not self.is_timed:
                self._mask(token_ids[:count])

    def learn(self, token_ids: Sequence[int], masks: NDArray[np.uint32]) -> None:
        """Keep masks, uint32 [n + 1, words], of the rows before and after n tokens that follow the committed ones."""
        if not self.matcher.is_error():  # else it is tried again, row by row
            self._masks |= {tuple(token_ids[:i]): mask for i, mask in enumerate(masks)}

    def _mask(self, prefix: Sequence[int]) -> NDArray[np.uint32]:
        """uint32 [words], a bit for each token that may follow `prefix`; none is set if the grammar rules that out."""
        key = tuple(prefix)
        if key not in self._masks:
            if self._move(prefix) < len(prefix):
                return np.zeros(_num_words(self.vocab_size), dtype=np.uint32)
            self._check_limits(len(prefix))
            began = time.thread_time()
            with self._contained(prefix):
                mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint32)
            seconds = time.thread_time() - began
            if self.matcher.is_error():
                error = self.matcher.get_error()
                self.restart()
                raise NoTokenLeft(
                    f"{self._option} is too complex to be followed here: {first_line(error)}. Simplify it.",
                    row=len(prefix),
                )
            self._masks[key] = mask
            self.is_timed = self.is_timed or seconds > _QUICK_SECONDS
            self._charge(seconds, len(prefix))
        return self._masks[key]

    def _move(self, prefix: Sequence[int]) -> int:
        """Put the matcher after `prefix`, or what the grammar allows of it. Returns the number of these tokens."""
        with self._contained(prefix):
            if self.matcher.is_error():
                self.restart()
            common = num_common_tokens(self._ahead, prefix)
            if common < len(self._ahead):
                self.matcher.rollback(len(self._ahead) - common)
                del self._ahead[common:]
            if common < len(prefix):
                count = self.matcher.try_consume_tokens([*prefix[common:]])
                self._ahead += prefix[common : common + count]
        return len(self._ahead)

    @contextmanager
    def _contained(self, prefix: Sequence[int]) -> Iterator[None]:
        """Raise NoTokenLeft for whatever the matcher raises, such as a panic in llguidance. It is a new one then."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                raise
            self.restart()
            raise NoTokenLeft(
                f"{self._option} cannot be followed here: {type(error).__name__}: {one_line(error)}. Simplify it.",
                row=len(prefix),
            ) from error

    def restart(self) -> None:
        """Replace a matcher that a draft has driven beyond its limits, or that has failed."""
        self.matcher, self._ahead = self._base.deep_copy(), []
        self.matcher.try_consume_tokens(self._committed)
        if self.matcher.is_error():
            self._limit = self._error()

    def _error(self) -> str:
        """Why the matcher cannot go on after the committed tokens."""
        return f"it is too complex ({first_line(self.matcher.get_error())})"


def fill_masks(drafts: Sequence[tuple[GrammarState, Draft]]) -> None:
    """Compute the masks for all rows of several answers' drafts in one call.

    Those after second candidates of a tree are computed when they are needed. So are all of them if this fails: then
    only the answer fails whose grammar it was.
    """
    quick = [(state, draft) for state, draft in drafts if not state.is_timed]
    timed = [(state, draft) for state, draft in drafts if state.is_timed]
    began = time.perf_counter()
    try:
        _fill_masks(quick)
    except BaseException as error:  # a panic in llguidance is no Exception
        if is_interrupt(error):
            raise
        log.warning("The masks of %d grammars are computed one by one: %s.", len(drafts), one_line(error))
        for state, _ in drafts:
            with suppress(BaseException):  # it fails again where its request is alone
                state.restart()
        return
    late = time.perf_counter() - began
    for state, _ in quick:  # one of them is slow, or the machine is busy
        state.is_timed = late > _QUICK_SECONDS * len(quick)
    for state, draft in timed:
        with suppress(BaseException):  # it fails again where its request is alone
            state.time_masks(draft)


def _fill_masks(drafts: Sequence[tuple[GrammarState, Draft]]) -> None:
    wanted = [(state, token_ids) for state, draft in drafts if (token_ids := state.missing(draft)) is not None]
    if not wanted:
        return
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    first = wanted[0][0]
    begins = [0, *accumulate(len(token_ids) + 1 for _, token_ids in wanted)]
    masks = np.empty((begins[-1], _num_words(first.vocab_size)), dtype=np.int32)
    places = [(state.matcher, begin, token_ids) for (state, token_ids), begin in zip(wanted, begins, strict=False)]
    if drafted := [place for place in places if place[2]]:
        fill_next_token_bitmask_par_with_draft_tokens(first.executor, drafted, masks)
    if plain := [(matcher, begin) for matcher, begin, token_ids in places if not token_ids]:
        fill_next_token_bitmask_par(first.executor, plain, masks)
    for (state, token_ids), begin, end in zip(wanted, begins, begins[1:], strict=False):
        state.learn(token_ids, masks[begin:end].view(np.uint32))


def _num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def _unpack(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """bool [vocab_size]: whether each token may follow."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
