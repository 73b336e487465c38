"""One request on its way through the loop."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Protocol

from outrider.decoding.metrics import Stats
from outrider.decoding.results import AnswerToken, Result, TextChunk, tokens_of_round
from outrider.errors import RequestError, one_line
from outrider.inputs.text import TextStream
from outrider.models.kv import Fetched
from outrider.system.guard import Guard, is_interrupt
from outrider.tokens.grammar import GrammarState
from outrider.tokens.sampling import DraftRows
from outrider.types import (
    CallObserver,
    Drafter,
    DraftPolicy,
    DraftRequest,
    DraftRule,
    Noise,
    Outcome,
    Sampler,
    Sequence,
    Slot,
    TokenLogprobs,
    Verifier,
)


class Sink(Protocol):
    """Where a request's output goes: pieces of text, the last with the result, or an error. Called by the worker."""

    def put(self, news: TextChunk | BaseException, /) -> None:
        """Take a piece. Must not raise, nor take long: all requests wait for it."""

    def qsize(self) -> int:
        """Pieces that were not read yet. A request pauses when it is far ahead of its reader."""


@dataclass(eq=False, slots=True)
class Request:
    """A sequence with everything that is needed to continue it, and its text.

    finish_reason: None while it runs, then "stop", "length" or "cancelled".
    """

    sequence: Sequence
    sampler: Sampler
    verifier: Verifier
    noise: Noise
    text: TextStream
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    grammar: GrammarState | None = None  # that the answer follows, as its sampler does
    policy: DraftPolicy | None = None  # chooses the drafter of each round; None: plain decoding
    num_assistant_tokens: int = 0  # most draft tokens per round
    ahead: bool = False  # whether drafters draft ahead for it
    rule: DraftRule | None = None  # may end a draft earlier
    sampled: bool = False  # whether tokens depend on the noise
    exact: bool = False  # whether tokens do not depend on drafts or on the batch
    logprobs: list[TokenLogprobs] | None = None  # of the committed tokens; None: not wanted
    cancel: Event | None = None  # set from any thread to end the answer here
    waits: bool = False  # whether its answer waits for rows as a prompt does
    thinks: bool = False  # whether the prompt has begun the model's reasoning
    save: Callable[[list[int]], None] | None = None  # called with the answer's tokens, unless it was cancelled
    reuse: bool = True  # starts from cached prefixes, and publishes its own
    fetched: tuple[Fetched, ...] = ()  # prefixes from files, for the prefix caches of its models
    name_of: Callable[[Drafter], str] = lambda drafter: type(drafter).__name__
    created: float = field(default_factory=time.perf_counter)
    stats: Stats = field(default_factory=Stats)
    sink: Sink = field(default_factory=SimpleQueue[TextChunk | BaseException])
    abandoned: bool = False  # set by the reader: the answer is not read any more
    # The worker's own
    slot: Slot = field(init=False)  # from `admit` on
    trees: bool = False  # whether drafts may be trees, from `admit` on
    features: tuple[str, ...] = ()  # the main model's hidden states that the drafter wants, from `admit` on
    finish_reason: str | None = None
    error: BaseException | None = None  # why the request failed
    done: bool = False  # the result or the error was sent
    tokens: list[AnswerToken] = field(default_factory=list)  # the committed tokens, with their sources
    num_published: int = 0  # characters of the text that were sent
    num_published_tokens: int = 0
    first_token_at: float = 0.0

    @property
    def drafters(self) -> Seq[Drafter]:
        """All drafters that may draft for it."""
        return self.policy.drafters if self.policy is not None else ()

    @property
    def decodes(self) -> bool:
        """Whether its prompt is read, and its answer has begun."""
        return len(self.sequence) > self.sequence.num_prompt_tokens

    @property
    def limit(self) -> int:
        """Most draft tokens of this round: none while the prompt is read, none past the answer's end.

        The bonus token is always generated, so the last of max_new_tokens is never drafted.
        """
        sequence = self.sequence
        if self.policy is None or not self.decodes or (self.grammar is not None and self.grammar.is_slow):
            return 0
        left = sequence.num_prompt_tokens + self.max_new_tokens - len(sequence)
        return min(self.num_assistant_tokens, left - 1)

    def draft_request(
        self, slot: Slot | None = None, together: int = 1, observer: CallObserver | None = None
    ) -> DraftRequest:
        """The request for the drafter. slot, together, observer: as in `DraftRequest`."""
        sequence = self.sequence
        return DraftRequest(
            sequence=sequence,
            limit=self.limit,
            sampler=self.sampler,
            verifier=self.verifier,
            noise=self.noise,
            eos_token_ids=self.eos_token_ids,
            rule=self.rule,
            num_left=sequence.num_prompt_tokens + self.max_new_tokens - len(sequence),
            ahead=self.ahead,
            trees=self.trees,
            observer=observer,
            slot=slot,
            together=together,
            is_cancelled=self._has_no_use,
        )

    @property
    def ended(self) -> bool:
        """Whether the answer has ended."""
        return bool(self.finish_reason or self.error)

    def end_if_cancelled(self) -> None:
        """End the answer if the reader has gone or cancelled. An answer that has ended does not change."""
        if self.ended:
            return
        try:
            if self.abandoned or self._is_cancelled():
                self.finish("cancelled")
        except Exception as error:  # the tokenizer's, or that of the app's `cancel`
            self.fail(error)

    def _has_no_use(self) -> bool:
        """Whether nobody waits for the answer any more, for whoever may only stop. Never raises."""
        try:
            return self.abandoned or self._is_cancelled()
        except Exception:  # raised again by `end_if_cancelled`
            return True

    def _is_cancelled(self) -> bool:
        """Whether the app has set `cancel`, an object that may be its own. Raises RequestError if that raises."""
        if self.cancel is None:
            return False
        what = f"cancel.is_set(), of a {type(self.cancel).__name__},"
        with Guard(what, RequestError, "Fix it, or pass a threading.Event."):
            return bool(self.cancel.is_set())

    def publish(self) -> None:
        """Send new text to the reader, then the result or the error."""
        if self.done:
            return
        try:
            self._publish_text()
        except Exception as error:  # the tokenizer's: isolate failures per request
            self.fail(error)
        if self.error:
            self.sink.put(self.error)
        self.done = self.ended

    def _publish_text(self) -> None:
        text = self.text.text[self.num_published :]
        is_last = bool(self.finish_reason and not self.error)
        if not (text or is_last):
            return
        num_tokens = self.text.num_tokens if is_last else self.text.num_certain_tokens
        new = slice(self.num_published_tokens, num_tokens)
        logprobs = None if self.logprobs is None else self.logprobs[new]
        self.num_published += len(text)
        self.num_published_tokens = num_tokens
        result = self.result() if is_last else None
        self.sink.put(TextChunk(text, self.stats, result, self.tokens[new], logprobs, self.thinks))

    def fail(self, error: BaseException) -> None:
        """End the request with an error, which is sent to its reader."""
        if is_interrupt(error):
            raise error
        if not isinstance(error, Exception):
            error = _failure(error)
        self.error = self.error or error

    def result(self) -> Result:
        """The answer, once it is finished; without the tokens of a stop string."""
        num_tokens = self.text.num_tokens
        return Result(
            text=self.text.text,
            token_ids=self.sequence.generated_token_ids[:num_tokens],
            finish_reason=self.finish_reason or "cancelled",
            stats=self.stats,
            seed=self.noise.seed if self.sampled else None,
            lossless=self.verifier.lossless,
            exact=self.exact,
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
            tokens=self.tokens[:num_tokens],
            thinks=self.thinks,
            stop_string=self.text.stop_string,
        )

    def commit(self, rows: DraftRows, outcome: Outcome, drafter: Drafter | None = None) -> None:
        """Commit a round's tokens, up to the end of the answer. Tokens past the end are not counted.

        drafter: made the draft.
        """
        if not self.first_token_at:
            self.first_token_at = time.perf_counter()
            if self.reuse:
                self.slot.publish(self.sequence.token_ids)  # for requests that begin with the same prompt
        draft, draft_token_ids = rows.draft, rows.draft.token_ids
        token_ids = self._until_end([*(draft_token_ids[i] for i in outcome.path), outcome.next_token_id])
        if self.logprobs is not None:
            self.logprobs += [rows.logprobs(i, token_id) for i, token_id in zip(outcome.rows, token_ids, strict=False)]
        self.sequence.token_ids.extend(token_ids)
        name = self.name_of(drafter) if drafter is not None and len(draft) else None
        self.tokens += tokens_of_round(token_ids, draft, outcome, name)
        self.sampler.commit(token_ids)
        stats = self.stats
        if stats.num_generated_tokens:  # the first token comes with the prompt
            verified = draft.depths
            if len(token_ids) <= outcome.num_accepted:  # the answer ended within the draft
                verified = [depth for depth in verified if depth < len(token_ids)]
            stats.count_round(verified, min(len(token_ids), outcome.num_accepted))
        stats.num_generated_tokens += len(token_ids)
        if token_ids[-1] in self.eos_token_ids or self.text.is_over:
            self.finish("stop")
        elif self.grammar is None or not self.grammar.is_slow:
            self._end_if_over()

    @property
    def is_ready(self) -> bool:
        """Whether it can take part in a round. An answer whose masks are late sits it out, and others go on."""
        if self.grammar is None or not self.grammar.is_slow:
            return True
        try:
            if not self.grammar.is_ready():
                return False
            if self.stats.num_generated_tokens:
                self._end_if_over()
        except BaseException as error:  # isolate failures per request; a panic in llguidance is no Exception
            self.fail(error)
        return not self.ended

    def _end_if_over(self) -> None:
        """End an answer that its grammar completes, or that has all its tokens."""
        if self.grammar is not None and self.grammar.is_complete():
            self.finish("stop")
        elif self.stats.num_generated_tokens == self.max_new_tokens:
            self.finish("length")

    def _until_end(self, token_ids: list[int]) -> list[int]:
        """The tokens up to the end of the answer. Their text is added to the answer."""
        left = self.max_new_tokens - self.stats.num_generated_tokens
        eos = next((i for i, token_id in enumerate(token_ids) if token_id in self.eos_token_ids), len(token_ids))
        token_ids = token_ids[: min(left, eos + 1)]
        if self.grammar is not None:
            token_ids = token_ids[: self.grammar.num_until_complete(token_ids)]
        # To find the token that ends the answer by its text, decode one at a time; otherwise the round at once.
        for i in range(len(token_ids)) if self.text.stepwise else ():
            self.text.push(token_ids[i : i + 1])
            if self.text.is_over:
                return token_ids[: i + 1]
        if not self.text.stepwise:
            self.text.push(token_ids)
        return token_ids

    def finish(self, reason: str) -> None:
        """End the answer and release the text that was held back. Nothing else sets `finish_reason`."""
        if self.finish_reason:
            return
        self.finish_reason = reason
        self.text.finish(cut=reason != "stop")
        now = time.perf_counter()
        first = self.first_token_at or now
        self.stats.time_to_first_token = first - self.created
        self.stats.decode_seconds = now - first
        if self.save is not None and not self.error and reason != "cancelled":
            self.save(self.result().token_ids)


def _failure(error: BaseException) -> RequestError:
    """An error in place of what would end the reader's thread or process: SystemExit, a library's panic."""
    failure = RequestError(f"The request failed with {type(error).__name__}: {one_line(error)}.")
    failure.__cause__ = error
    return failure
