"""What a model is to the rest of the runtime: calls that evaluate tokens, places in a cache, rows of logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    import numpy as np
    from numpy.typing import NDArray

Logits: TypeAlias = "NDArray[np.float32]"  # [vocab_size], unnormalised


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits of a row, as the device has found them; see `outrider.sampling.top`.

    token_ids: int64 [k], ascending. logits: float32 [k]. bound: what no logit that is not listed exceeds. logsumexp:
    of the whole row, which has `vocab_size` tokens; in single precision, and not finite where the row is broken.
    """

    token_ids: NDArray[np.int64]
    logits: Logits
    bound: float
    logsumexp: float
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One row of a step: its largest logits, if the device looks for them, and all where these do not suffice.

        row = step.row(i)
        sampler.best(row, prefix)

    full: fetches the whole row, float32 [vocab_size]. top: None where the device does not look for the largest.
    """

    full: Callable[[], Logits]
    top: TopLogits | None = None

    @classmethod
    def of(cls, logits: Logits) -> LogitsRow:
        """A row that is there already, float32 [vocab_size]."""
        return cls(lambda: logits)


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The sizes that a model was compiled for. It has one slot: sequences take turns."""

    window: int  # rows of a call, whatever is wanted; rows on both sides of a window's end take two
    max_prompt_tokens: int
    max_tokens: int  # of prompt and answer


_MOST = 64  # rows that anything is rounded up to


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds a number of rows up: to at least `least`, and to a multiple of `multiple`."""

    least: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.least <= _MOST and 1 <= self.multiple <= _MOST):
            raise ValueError(f"rows are rounded up to numbers from 1 to {_MOST}")

    def __call__(self, count: int) -> int:
        """The number that `count` is rounded up to."""
        return -(-max(count, self.least) // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class RowRule:
    """What calls are padded to, so that a row has the same bits whatever runs with it.

    sequence: rows of each sequence. call: rows of the whole call, the sequences' own rounded up before. logits: rows of
    logits. apart: only the attention sees the rows that are added to a sequence; the products with weights, which take
    most of the time, do not.
    """

    sequence: Rounding = field(default_factory=Rounding)
    call: Rounding = field(default_factory=Rounding)
    logits: Rounding = field(default_factory=Rounding)
    apart: bool = False

    def num_rows(self, counts: Iterable[int]) -> int:
        """Rows that a call computes for sequences with so many rows each."""
        return self.call(sum(counts if self.apart else map(self.sequence, counts)))

    @property
    def num_spare(self) -> int:
        """Places in the cache that padding may write to, behind a sequence's last token."""
        most = [max(each.least, each.multiple) - 1 for each in (self.sequence, self.call, self.logits)]
        return most[0] + max(most[1:])

    def __str__(self) -> str:
        multiple = max(self.sequence.multiple, self.call.multiple)
        if multiple > 1:
            return f"rows in multiples of {multiple}"
        if self.call.least > 1:
            return f"at least {self.call.least} rows a call"
        if self.sequence.least > 1:
            return f"at least {self.sequence.least} rows a sequence" + (" in the attention" if self.apart else "")
        return "any number of rows"


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether rows have the same bits in any company, as it was measured with one model, device and setting.

    groups: numbers of rows of a call without padding, in groups whose rows have the same bits. rule: the padding with
    which the rest was measured. differences: the largest difference of a logit to a reading in one call, by other
    ways to read the same tokens; 0 is bit for bit. None of them: nothing was measured.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    rule: RowRule = field(default_factory=RowRule)
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether it was measured, and every row had the same bits every time."""
        return bool(self.differences) and not any(self.differences.values())

    @property
    def largest_difference(self) -> float:
        """Of any logit, in any way."""
        return max(self.differences.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, for the parts that would otherwise have to assume it."""

    # With `rows`, logits do not depend on what else is in the call, nor on what another text has left in the cache.
    # Without: they may, by a few last bits, or by what a quantised cache rounds. True only where it was measured.
    bit_exact_batching: bool
    rows: RowRule = field(default_factory=RowRule)  # what calls are padded to
    one_call: bool = True  # several sequences share the device's call; or run one after another
    fixed: FixedShape | None = None  # None: chunks, and slots, of any size that fits
    features: tuple[str, ...] = ()  # hidden states that a chunk can ask for


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is given to begin with.

    scope: all besides the tokens that keys and values depend on, such as an adapter or an image: what is in a cache is
    shared within one scope alone.
    """

    token_ids: Seq[int]
    scope: bytes = b""


NO_PROMPT = Prompt(())


class Slot(Protocol):
    """A sequence's place in one model's KV cache."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache."""

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left; no effect on a shorter slot. O(1).

        Not to fewer than were there when it was opened, or were kept: others may have them in common with this slot.
        """

    def skip_to(self, length: int) -> None:
        """Benchmarks only: pretend that the slot holds `length` tokens."""

    def publish(self, token_ids: Seq[int]) -> None:
        """Publish this slot's committed prefix to the prefix cache. Not during a call of this slot.

        token_ids: the sequence's committed tokens. Other slots may share the prefix from now on. When the slot is
        closed, the prefix stays until it is evicted.
        """

    def close(self) -> None:
        """Give the place back. Closing twice does no harm."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """One model's prefix-cache occupancy and hit statistics.

    num_tokens: capacity. num_used_tokens: reserved by running requests. num_published_tokens: published prefixes that
    no running request uses; they are evicted when room is needed. num_evicted_tokens: evicted so far. num_requests:
    requests started, with num_prompt_tokens in all. num_hits: requests that found a cached prefix, num_cached_tokens in
    all.
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

    @property
    def num_bytes(self) -> int:
        """What the cache may take."""
        return int(self.num_tokens * self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to a slot. The logits of the last `num_rows` of them are wanted.

    features: hidden states that are wanted of all of them, by names out of `Capabilities.features`.
    """

    slot: Any  # the backend's own kind of Slot
    token_ids: Seq[int]
    num_rows: int
    features: tuple[str, ...] = ()


class Step(Protocol):
    """The rows that a call was asked for, chunk after chunk. Valid until the backend's next call."""

    def row(self, i: int) -> LogitsRow:
        """Row i, cut to the real vocabulary."""

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk of the call asked for, float32 [n, width], one beside the other.

        Row j is of the chunk's token j, read behind all tokens before it.

        Raises:
            BundleError: when the model gives none.
        """


class Pending(Protocol):
    """A call under way."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Step:
        """Block until the rows are there."""


class Backend(Protocol):
    """Evaluates tokens for one model on one device."""

    @property
    def vocab_size(self) -> int:
        """Tokens there are; a row of logits has as many."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do with this model on this device."""

    @property
    def seconds(self) -> float:
        """Time spent in the device's calls so far."""

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can have."""

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Slot | None:
        """A slot with room for `max_tokens`; None while other slots hold the room.

        prompt: what is going to be read. Where a text of its scope that was kept begins alike, the slot has that much
        of it from the start; the last token is always left to be read.
        """

    def submit(self, chunks: Seq[Chunk]) -> Pending:
        """Evaluate chunks of one or several sequences in one call. A slot appears once at most."""


class PaddedBackend(Backend, Protocol):
    """A backend whose calls can be padded."""

    exactness: Exactness  # what `use` was given
    can_pad_apart: bool  # whether `RowRule.apart` can be

    def use(self, exactness: Exactness) -> None:
        """From now on, pad calls by its rule, and claim what it says. Not while slots are open."""


class CompiledModel(PaddedBackend, Protocol):
    """A backend of a model in a file, as the engine sets it up."""

    runtime: str  # the library that runs it
    device: str
    precision: str  # "f32", "bf16", … of calculations
    cache_precision: str  # of keys and values
    logits_width: int

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token takes in the cache, over all layers."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """All besides the model that the time of a call depends on, and that can be asked for."""

    def run_in_background(self, wanted: bool) -> None:
        """Let other work be done between `submit` and `wait`, and count seconds until a call is done; or do not."""

    @property
    def cache(self) -> CacheUse:
        """What is in the cache."""

    def allocate(self, max_tokens: int) -> None:
        """Make the cache, or set how large it may get, anew; called before any `open`, and while none is open."""

    def tokens_for(self, max_tokens: int) -> int:
        """What to give `allocate` so that a slot can have `max_tokens`."""
