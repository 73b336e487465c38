"""The interface of a model: calls that evaluate tokens, slots in its KV cache, rows of logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from outrider.errors import RequestError
from outrider.types.layout import Layout
from outrider.types.prompt import NO_PROMPT, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from outrider.types.capabilities import Capabilities, Exactness, RowCost, RowRule

Logits: TypeAlias = "NDArray[np.float32]"  # [vocab_size], unnormalised


@dataclass(frozen=True, slots=True)
class ListedLogits:
    """The logits of a row that are finite. All others are −inf.

    token_ids: int64 [n], ascending. logits: float32 [n].
    """

    token_ids: NDArray[np.int64]
    logits: Logits


@dataclass(eq=False, slots=True)  # not frozen: that takes twice as long, and a call makes one for each of its rows
class LogitsRow:
    """One row of a step.

        row, *others = step.rows(chunk)
        sampler.best(row, prefix)

    full: the whole row, float32 [vocab_size]. listed: its finite logits, if these are few, such as those of a cut
    output matrix.
    """

    full: Callable[[], Logits]
    listed: ListedLogits | None = None

    @classmethod
    def of(cls, logits: Logits) -> LogitsRow:
        """A row in memory, float32 [vocab_size]."""
        return cls(lambda: logits)

    def finite(self) -> tuple[NDArray[np.int64] | None, Logits]:
        """The tokens int64 [n] that are listed, and their logits; None: all tokens."""
        return (None, self.full()) if self.listed is None else (self.listed.token_ids, self.listed.logits)

    def copied(self) -> LogitsRow:
        """The same row, valid for as long as it is wanted."""
        logits = self.full().copy()
        return LogitsRow(lambda: logits, self.listed)


class Slot(Protocol):
    """One sequence's part of one model's KV cache."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache."""

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left; no effect on a shorter slot. O(1).

        Fewer are left where a model's layers keep states and there is none of that length any more: those that were
        dropped beyond are read again. The length at which the last call began is always there, and the lengths after
        each token of an answer that it read, as far as there was room.

        Tokens that were published, or cached when the slot was opened, cannot be trimmed: other slots may share them.
        """

    def fork(self, count: int, length: int) -> int:
        """Take room for branches beside the first one of the next call's tree, up to `count` of up to `length` tokens.

        Returns for how many there is room. A backend that evaluates no trees has none.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Of the last call's tree, keep the committed tokens and this path of the draft. Only after a `fork`."""

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish this slot's committed prefix to the prefix cache. Not during a call of this slot.

        token_ids: the sequence's committed tokens. Other slots may share the prefix from now on. When the slot is
        closed, the prefix stays until it is evicted.
        """

    def close(self) -> None:
        """Release the slot. Closing twice does no harm."""


class BenchmarkSlot(Slot, Protocol):
    """A slot of a benchmark or measurement, whose content does not matter. Requests never have one."""

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds `length` tokens. Nothing of it is published."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """One model's prefix-cache occupancy and hit statistics.

    num_tokens: capacity. num_used_tokens: reserved by running requests. num_published_tokens: published prefixes that
    no running request uses; they are evicted when room is needed. num_evicted_tokens: evicted so far. num_requests:
    requests started, with num_prompt_tokens in all. num_hits: requests that found a cached prefix, num_cached_tokens in
    all. num_rows: rows of states of a model that has some, as num_tokens and the others are of keys and values; 0 for
    others.
    """

    num_tokens: int
    bytes_per_token: float
    num_used_tokens: int
    num_published_tokens: int
    num_evicted_tokens: int
    num_requests: int
    num_hits: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_rows: int = 0
    bytes_per_row: int = 0
    num_used_rows: int = 0
    num_published_rows: int = 0
    num_evicted_rows: int = 0

    @property
    def num_bytes(self) -> int:
        """Most bytes of the cache."""
        return int(self.num_tokens * self.bytes_per_token) + self.num_rows * self.bytes_per_row


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens to append to a slot, with the logits of the last `num_rows` of them.

    features: names from `Capabilities.features`: hidden states that are wanted for all tokens. parents: None for a
    chain, in which each token follows the one before. Several candidates form one tree: those of the draft
    (`Draft.parents`), which is the last `num_rows` − 1 tokens and follows the token before them. Rows are in the order
    of the tokens. The slot has to have room for the branches (`Slot.fork`), and holds the first one until `Slot.keep`.
    generated: whether these are tokens of an answer, not of a prompt; see `RowRule.separate`. hidden_states: float32
    [n, width], which a drafter reads besides the tokens; None stands for zeros.
    """

    slot: Any  # the backend's own kind of Slot
    token_ids: Sequence[int]
    num_rows: int
    features: tuple[str, ...] = ()
    parents: Sequence[int] | None = None
    generated: bool = False
    hidden_states: NDArray[np.float32] | None = None
    layout: Layout = field(init=False)  # how its tokens follow each other, made once

    def __post_init__(self) -> None:
        self.layout = Layout(len(self.token_ids), self.num_rows, self.parents)

    def check_chain(self, backend: object) -> None:
        """Raise RequestError if this is a tree. For backends that evaluate chains only, such as `backend`."""
        if self.parents is not None:
            raise RequestError(
                f"A chunk of {len(self.token_ids)} tokens is a tree (parents={self.parents}), and "
                f"{type(backend).__name__} evaluates chains only. Submit one of its paths, with parents=None."
            )


class Step(Protocol):
    """The results of a call, by its chunks. Valid until the backend's next call."""

    def rows(self, chunk: Chunk) -> Sequence[LogitsRow]:
        """The rows that a chunk asked for, cut to the real vocabulary: those of its last `num_rows` tokens."""

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk asked for, float32 [n, width], concatenated.

        Row j belongs to the chunk's token j.

        Raises:
            BundleError: when the model has none.
        """


class Pending(Protocol):
    """A running call. It runs to its end: an interrupted call may leave the device's graph half prepared."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Step:
        """Block until the rows are there.

        Raises:
            DeviceError: when the device failed. The slots are then as before the call, or shorter.
        """


class Backend(Protocol):
    """Evaluates tokens for one model on one device."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary; the width of a row of logits."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do with this model on this device."""

    @property
    def seconds(self) -> float:
        """Seconds spent in the device's calls so far."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence."""

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Slot | None:
        """A slot with room for `max_tokens`; None while other slots hold the room.

        prompt: the tokens that will be read. The slot starts from its longest cached prefix of the same scope, without
        the prompt's last token, whose row is wanted.

        Raises:
            RequestError: for embeds, if this backend reads none.
        """

    def submit(self, chunks: Sequence[Chunk]) -> Pending:
        """Evaluate chunks of one or several sequences in one call. A slot appears once at most.

        Raises:
            RequestError: for a tree, if this backend evaluates none. Then nothing was appended.
        """

    def clear_prefixes(self) -> None:
        """Drop all cached prefixes that no open slot uses."""


class PaddedBackend(Backend, Protocol):
    """A backend whose calls can be padded."""

    exactness: Exactness  # as given to `use`
    can_pad_apart: bool  # whether `RowRule.apart` is possible
    can_divide: bool  # whether `RowRule.most` is possible
    few_rows_differ: bool  # products may give few rows other bits than more of them, on processors with AVX2 alone

    @property
    def separate_rules(self) -> Sequence[RowRule]:
        """The rules with `RowRule.separate` that are possible, the cheapest first."""

    def use(self, exactness: Exactness) -> None:
        """Pad calls by this rule from now on, and report this exactness. Not while slots are open."""


class CompiledModel(PaddedBackend, Protocol):
    """A backend that was compiled from a model's file."""

    runtime: str  # the library that runs it
    device: str
    precision: str  # of calculations: "f32", "bf16", …
    cache_precision: str  # of keys and values
    logits_width: int

    @property
    def has_failed(self) -> bool:
        """Whether a call has failed, and the model has to be loaded again."""

    @property
    def num_layers(self) -> int:
        """Layers that have a cache of their own."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in the cache, over all layers."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the time of a call depends on besides the model, as far as it is known."""

    def keep_rows(self, cost: RowCost) -> None:
        """Keep the number of rows from call to call until `use`, if this backend can; see `SteadyRows`."""

    def run_in_background(self, wanted: bool) -> None:
        """Run calls in the background between `submit` and `wait`, and count seconds until a call is done; or stop."""

    @property
    def cache(self) -> CacheUse:
        """Prefix-cache occupancy and hit statistics."""

    @property
    def prefixes(self) -> Any:
        """The prefix cache as `models.kv.PrefixStore` saves it, after `allocate`; None if that is not possible."""

    def allocate(self, max_tokens: int) -> None:
        """Allocate a new cache, or set its largest size. Called before the first `open`, and while no slot is open."""

    def tokens_for(self, max_tokens: int) -> int:
        """The argument for `allocate` with which one slot can have `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has ended.

    context: tokens in the cache before it, of the longest sequence. began, submitted: when `submit` began and ended.
    waited, ended: when `wait` began and ended. All four in seconds of `time.perf_counter`. ran: seconds that the device
    was busy within `submit`. busy: the same in all; 0 if the backend does not say. error: why the call failed, or None.
    """

    backend: Backend
    chunks: Sequence[Chunk]
    context: int
    began: float
    submitted: float
    waited: float
    ended: float
    ran: float
    busy: float
    error: BaseException | None = None


class CallObserver(Protocol):
    """Is told of models' calls, in the thread that makes them. Must be fast, and must not raise."""

    def called(self, call: Call) -> None:
        """A call has ended, or failed."""
