"""One answer on its way through the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType

from outrider.decoding.delivery import Delivery
from outrider.decoding.metrics import Stats
from outrider.decoding.request import Request
from outrider.decoding.results import AnswerToken, Result, tokens_of_round
from outrider.errors import RequestError, one_line
from outrider.models.kv import Fetched
from outrider.system.guard import is_interrupt
from outrider.tokens.grammar import GrammarState
from outrider.tokens.sampling import DraftRows
from outrider.types import CallObserver, Drafter, DraftRequest, Outcome, Sampler, Slot, TokenLogprobs, TokenSequence


class Status(Enum):
    """How far an answer is."""

    WAITING = auto()  # for room in the caches
    READING = auto()  # its prompt
    DECODING = auto()  # from the first token on
    FINISHED = auto()  # it has a finish_reason
    FAILED = auto()  # it has an error


_DECODING, _ENDED = Status.DECODING, (Status.FINISHED, Status.FAILED)  # asked for many times a round


@dataclass(eq=False, slots=True)
class Answer:
    """A sequence with everything that is needed to continue it.

    finish_reason: None while it runs, then "stop", "length" or "cancelled".
    """

    request: Request
    sequence: TokenSequence
    sampler: Sampler
    delivery: Delivery
    grammar: GrammarState | None = None  # that it follows, as its sampler does
    logprobs: list[TokenLogprobs] | None = None  # of the committed tokens; None: not wanted
    fetched: tuple[Fetched, ...] = ()  # prefixes from files, for the prefix caches of its models
    stats: Stats = field(default_factory=Stats)
    # The scheduler's
    status: Status = Status.WAITING
    slot: Slot = field(init=False)  # from `admit` on
    trees: bool = False  # whether drafts may be trees, from `admit` on
    features: tuple[str, ...] = ()  # the main model's hidden states that the drafters want, from `admit` on
    finish_reason: str | None = None
    error: BaseException | None = None  # why it failed
    tokens: list[AnswerToken] = field(default_factory=list)  # the committed tokens, with their sources
    first_token_at: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether it has finished or failed."""
        return self.status in _ENDED

    @property
    def decodes(self) -> bool:
        """Whether its prompt is read, and it goes on."""
        return self.status is _DECODING

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return self.sequence.num_prompt_tokens + self.request.max_new_tokens - len(self.sequence)

    @property
    def limit(self) -> int:
        """Most draft tokens of this round: none while the prompt is read, none past the answer's end.

        The bonus token is always generated, so the last of max_new_tokens is never drafted.
        """
        if self.request.policy is None or not self.decodes:
            return 0
        return min(self.request.num_assistant_tokens, self.num_left - 1)

    def draft_request(
        self, slot: Slot | None = None, together: int = 1, observer: CallObserver | None = None
    ) -> DraftRequest:
        """The request for the drafter. slot, together, observer: as in `DraftRequest`."""
        request = self.request
        return DraftRequest(
            sequence=self.sequence,
            limit=self.limit,
            sampler=self.sampler,
            verifier=request.verifier,
            noise=request.noise,
            eos_token_ids=request.eos_token_ids,
            rule=request.rule,
            num_left=self.num_left,
            ahead=request.ahead,
            trees=self.trees,
            observer=observer,
            slot=slot,
            together=together,
            is_cancelled=self._has_no_use,
        )

    def _has_no_use(self) -> bool:
        """Whether nobody waits for it any more, for whoever may only stop. Never raises."""
        try:
            return self.delivery.is_cancelled()
        except Exception:  # raised again by `end_if_cancelled`
            return True

    def end_if_cancelled(self) -> None:
        """End it if the reader has gone or cancelled. An answer that has ended does not change."""
        if self.ended or not self.delivery.may_be_cancelled:
            return
        with isolated(self):
            if self.delivery.is_cancelled():
                self.finish("cancelled")

    def publish(self) -> None:
        """Send new text to the reader, then the result or the error."""
        delivery = self.delivery
        if delivery.done or not (self.ended or delivery.has_news):
            return
        with isolated(self):  # the tokenizer may fail
            if self.status is Status.FINISHED:
                delivery.send(self.tokens, self.logprobs, self.stats, self.result())
            elif delivery.has_news:
                delivery.send(self.tokens, self.logprobs, self.stats)
        if self.error:
            delivery.sink.put(self.error)
        delivery.done = self.ended

    def note_progress(self) -> None:
        """A piece of the prompt is in the cache, or was found there."""
        self.stats.num_read_tokens = min(self.slot.length, self.stats.num_prompt_tokens)
        self.delivery.send_progress(self.stats)

    def fail(self, error: BaseException) -> None:
        """End it with an error, which is sent to its reader."""
        if is_interrupt(error):
            raise error
        if not isinstance(error, Exception):
            error = _failure(error)
        self.error, self.status = self.error or error, Status.FAILED

    def result(self) -> Result:
        """The answer, once it is finished; without the tokens of a stop string."""
        request, text = self.request, self.delivery.text
        num_tokens = text.num_tokens
        return Result(
            text=text.text,
            token_ids=self.sequence.generated_token_ids[:num_tokens],
            finish_reason=self.finish_reason or "cancelled",
            stats=self.stats,
            seed=request.noise.seed if request.sampled else None,
            lossless=request.verifier.lossless,
            exact=request.exact,
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
            tokens=self.tokens[:num_tokens],
            thinks=self.delivery.thinks,
            stop_string=text.stop_string,
        )

    def commit(self, rows: DraftRows, outcome: Outcome, drafter: Drafter | None = None) -> None:
        """Commit a round's tokens, up to the end of the answer. Tokens past the end are not counted.

        drafter: made the draft.
        """
        if not self.first_token_at:
            self.first_token_at = time.perf_counter()
            self.stats.num_read_tokens = self.stats.num_prompt_tokens
            if self.request.reuse:
                self.slot.publish(self.sequence.token_ids)  # for requests that begin with the same prompt
        draft, draft_token_ids = rows.draft, rows.draft.token_ids
        token_ids = self._until_end([*(draft_token_ids[i] for i in outcome.path), outcome.next_token_id])
        if self.logprobs is not None:
            self.logprobs += [rows.logprobs(i, token_id) for i, token_id in zip(outcome.rows, token_ids, strict=False)]
        self.sequence.token_ids.extend(token_ids)
        name = self.request.name_of(drafter) if drafter is not None and len(draft) else None
        self.tokens += tokens_of_round(token_ids, draft, outcome, name)
        self.sampler.commit(token_ids)
        stats = self.stats
        if stats.num_generated_tokens:  # the first token comes with the prompt
            verified = draft.depths
            if len(token_ids) <= outcome.num_accepted:  # the answer ended within the draft
                verified = [depth for depth in verified if depth < len(token_ids)]
            stats.count_round(verified, min(len(token_ids), outcome.num_accepted))
        elif not self.ended:
            self.status = Status.DECODING
        stats.num_generated_tokens += len(token_ids)
        is_over = self.delivery.text.is_over or (self.grammar is not None and self.grammar.is_complete())
        if token_ids[-1] in self.request.eos_token_ids or is_over:
            self.finish("stop")
        elif stats.num_generated_tokens == self.request.max_new_tokens:
            self.finish("length")

    def _until_end(self, token_ids: list[int]) -> list[int]:
        """The tokens up to the end of the answer. Their text is added to the answer."""
        text, eos_token_ids = self.delivery.text, self.request.eos_token_ids
        left = self.request.max_new_tokens - self.stats.num_generated_tokens
        eos = next((i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids), len(token_ids))
        token_ids = token_ids[: min(left, eos + 1)]
        if self.grammar is not None:
            token_ids = token_ids[: self.grammar.num_until_complete(token_ids)]
        # To find the token that ends the answer by its text, decode one at a time; otherwise the round at once.
        for i in range(len(token_ids)) if text.stepwise else ():
            text.push(token_ids[i : i + 1])
            if text.is_over:
                return token_ids[: i + 1]
        if not text.stepwise:
            text.push(token_ids)
        return token_ids

    def finish(self, reason: str) -> None:
        """End the answer and release the text that was held back. Nothing else sets `finish_reason`."""
        if self.finish_reason:
            return
        self.finish_reason = reason
        self.delivery.text.finish(cut=reason != "stop")
        now = time.perf_counter()
        first = self.first_token_at or now
        self.stats.time_to_first_token = first - self.request.created
        self.stats.decode_seconds = now - first
        if self.status is not Status.FAILED:
            self.status = Status.FINISHED
            if self.delivery.save is not None and reason != "cancelled":
                self.delivery.save(self.result().token_ids)


class isolated:  # noqa: N801 - as contextlib.suppress
    """End these answers, and no others, with the error that is raised within.

        with isolated(answer):
            answer.commit(rows, outcome)

    Whatever it is: an app's code raises what it likes, and a panic in llguidance is no Exception.
    """

    __slots__ = ("_answers",)

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None, /) -> bool:
        if error is not None:
            for answer in self._answers:
                answer.fail(error)
        return error is not None


def _failure(error: BaseException) -> RequestError:
    """An error in place of what would end the reader's thread or process: SystemExit, a library's panic."""
    failure = RequestError(f"The request failed with {type(error).__name__}: {one_line(error)}.")
    failure.__cause__ = error
    return failure
