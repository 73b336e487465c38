"""A model in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.backends.divided import DividedCall, divide
from outrider.types import (
    NO_PROMPT,
    Capabilities,
    Chunk,
    Exactness,
    Layout,
    Logits,
    LogitsRow,
    Prompt,
    RowRule,
    answer_keys,
    num_common_tokens,
    prompt_keys,
)

_MAX_TOKENS = 2048


@dataclass(slots=True)
class FakeSlot:
    """A slot that stores the tokens themselves instead of keys and values."""

    backend: FakeBackend
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)  # for every token, the kernels that read it
    scope: bytes = b""
    closed: bool = False
    num_published: int = 0
    tree: tuple[int, Layout, list[int], list[int]] = field(init=False)  # the last call's: its begin, tokens and kernels

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left."""
        del self.token_ids[length:], self.shifts[length:]
        self.num_published = min(self.num_published, length)

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds `length` tokens; see `BenchmarkSlot`."""
        self.token_ids, self.shifts = [0] * length, [0] * length

    def fork(self, count: int, length: int) -> int:  # noqa: ARG002
        """There is always room."""
        return count

    def keep(self, path: Sequence[int]) -> None:
        """Of the last call's tree keep this path of the draft."""
        begin, layout, tokens, shifts = self.tree
        self.trim(begin)
        self.token_ids += [tokens[i] for i in layout.kept(path)]
        self.shifts += [shifts[i] for i in layout.kept(path)]

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish the slot's part of committed tokens."""
        self.num_published = num_common_tokens(prompt_keys(self.token_ids), token_ids)

    def close(self) -> None:
        """Release the slot. Published tokens stay in the backend."""
        if self.num_published and not self.closed:
            published = self.token_ids[: self.num_published], self.shifts[: self.num_published]
            self.backend.published.setdefault(self.scope, []).append(published)
        self.closed = True


class FakeBackend:
    """A model whose logits are a fixed random function of the last `memory` tokens and the position.

        backend = FakeBackend(vocab_size=16, seed=1)

    noise: the difference from the model with the same seed and no noise, for drafts that are sometimes right. Raises
    AssertionError when a slot is overfilled, appears twice in a call, or is used after it was closed.

    features: names of its hidden states, `width` numbers each; see `features_after`.

    kernels, attention_kernels: real processors calculate in different orders, depending on the rows of a call and of a
    sequence. With these functions, which return any number for a kernel, a row's logits depend a little on the kernels
    that read each token before it. Padding that `use` sets can prevent that::

        FakeBackend(16, kernels=lambda rows: 0 if rows % 8 == 0 else rows)

    single_kernels: the same for calls in which each sequence has one row, by the number of sequences.
    """

    width = 4
    capabilities: Capabilities

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        noise: float = 0.0,
        memory: int = 2,
        kernels: Callable[[int], int] | None = None,
        attention_kernels: Callable[[int], int] | None = None,
        single_kernels: Callable[[int], int] | None = None,
        can_pad_apart: bool = False,
        can_divide: bool = False,
        separate_rules: tuple[RowRule, ...] = (),
        features: tuple[str, ...] = (),
    ) -> None:
        self.features = features
        self.vocab_size, self.seed, self.noise, self.memory = vocab_size, seed, noise, memory
        self.can_pad_apart, self.can_divide, self.separate_rules = can_pad_apart, can_divide, separate_rules
        self.few_rows_differ = False
        self._kernels, self._attention_kernels = kernels, attention_kernels
        self._single_kernels = single_kernels
        self.seconds = 0.0
        self.max_tokens = _MAX_TOKENS
        # By scope: published texts and their shifts.
        self.published: dict[bytes, list[tuple[list[int], list[int]]]] = {}
        self.calls: list[list[int]] = []  # for every call, how many tokens each chunk had
        self.num_rows: list[int] = []  # for every call, the rows that it computed, padding included
        self.use(Exactness())
        # A model without kernels calculates in one order.
        exact = kernels is None and attention_kernels is None and single_kernels is None
        self.capabilities = replace(self.capabilities, bit_exact_batching=exact)

    def use(self, exactness: Exactness) -> None:
        """Pad calls by this rule, and report this exactness."""
        self.exactness = exactness
        self.capabilities = Capabilities(
            exactness.holds,
            exactness.rule,
            features=self.features,
            trees=True,
            expects_exact=exactness.is_expected,
        )

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> FakeSlot:
        """A slot. There is always room, and nothing is evicted."""
        prompt.check_tokens(self)
        prompt.check_adapter(self)
        if self.capabilities.marks_answers:
            prompt = prompt.with_marked_answers()
        text, published = list(prompt.token_ids[:-1]), self.published.get(prompt.scope, [])
        found = max(published, key=lambda each: num_common_tokens(each[0], text), default=([], []))
        num_cached = num_common_tokens(found[0], text)
        return FakeSlot(self, max_tokens, text[:num_cached], found[1][:num_cached], prompt.scope)

    def clear_prefixes(self) -> None:
        """Drop all cached prefixes."""
        self.published.clear()

    def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
        """Evaluate chunks at once, in one call, or in several if they have more rows than the rule allows."""
        calls = divide(chunks, self.capabilities.rows)
        if len(calls) == 1:
            return self._submit(chunks)
        step = DividedCall(self._submit, calls).wait()
        return FakeBackend.Step(
            {each: [row.full() for row in step.rows(each)] for each in chunks},
            {each: step.features(each) for each in chunks if each.features},
        )

    def _submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
        """One call; the step is its own pending."""
        self.calls.append([len(chunk.token_ids) for chunk in chunks])
        if len({id(chunk.slot) for chunk in chunks}) != len(chunks):
            raise AssertionError("a slot appears twice in one call")
        rule = self.capabilities.rows
        counts = [len(chunk.token_ids) for chunk in chunks]
        sequences, num_rows = self._sequences(chunks)
        self.num_rows.append(num_rows)
        of_call = self._kernels(num_rows) if self._kernels else 0
        if self._single_kernels and set(sequences) == {1}:
            of_call += 100_000 * self._single_kernels(len(sequences))
        logits, features = {}, {}
        for chunk, count in zip(chunks, counts, strict=True):
            slot: FakeSlot = chunk.slot
            is_separate = rule.separate and chunk.generated
            num_seen = 1 if is_separate else rule.sequence(count)
            of_sequence = self._attention_kernels(num_seen) if self._attention_kernels else 0
            longest = max(map(len, chunk.layout.branches), default=0)
            if slot.closed or slot.backend is not self or slot.length + longest > slot.max_tokens:
                raise AssertionError(f"slot closed, foreign or overfilled: {slot}")
            is_marked = chunk.generated and self.capabilities.marks_answers
            token_ids = answer_keys(chunk.token_ids) if is_marked else [*chunk.token_ids]
            shifts = [1000 * of_call + of_sequence] * count
            before, before_shifts, branches = [*slot.token_ids], [*slot.shifts], chunk.layout.branches
            paths = {branch[k]: branch[: k + 1] for branch in branches for k in range(len(branch))}
            rows, of_chunk = [], []
            for i in range(count):
                text = before + [token_ids[j] for j in paths[i]]
                if i >= count - chunk.num_rows:
                    rows.append(self.logits_after(text) + self._shift(before_shifts + shifts[: len(paths[i])]))
                of_chunk.append([self.features_after(text, name) for name in chunk.features])
            logits[chunk] = rows
            features[chunk] = np.array(of_chunk, dtype=np.float32).reshape(count, -1)
            slot.tree = len(before), chunk.layout, token_ids, shifts
            slot.token_ids += [token_ids[i] for i in branches[0]]
            slot.shifts += shifts[: len(branches[0])]
        return FakeBackend.Step(logits, features)

    def _sequences(self, chunks: Sequence[Chunk]) -> tuple[list[int], int]:
        """The rows of each sequence that the attention sees, and the rows of the call. Both with padding."""
        rule = self.capabilities.rows
        counts = [len(chunk.token_ids) for chunk in chunks]
        if not rule.separate:
            return [rule.sequence(count) for count in counts], rule.num_rows(counts)
        both = zip(chunks, counts, strict=True)
        sequences = [n for chunk, count in both for n in ([1] * count if chunk.generated else [rule.sequence(count)])]
        num_rows = rule.call(sum(sequences) + (rule.dummy_rows if set(sequences) == {1} else 0))
        if num_rows > sum(sequences):
            sequences.append(num_rows - sum(sequences))
        return sequences, num_rows

    def logits_after(self, token_ids: Sequence[int]) -> Logits:
        """float32 [vocab_size] for the token after these, which may be marked."""
        token_ids = prompt_keys(token_ids)
        key = [len(token_ids), *token_ids[-self.memory :]]

        def normal(seed: int) -> Any:
            return np.random.default_rng([seed, *key]).standard_normal(self.vocab_size)

        own = self.noise * normal(self.seed + 1) if self.noise else 0
        logits: Logits = (2 * (normal(self.seed) + own)).astype(np.float32)
        return logits

    def features_after(self, token_ids: Sequence[int], name: str) -> NDArray[np.float32]:
        """float32 [width], the hidden state `name` of the last of these: its position, its id, and random numbers."""
        if name not in self.features:
            raise AssertionError(f"there is no hidden state {name!r}")
        token_ids = prompt_keys(token_ids)
        position, latest = len(token_ids) - 1, [*token_ids[-self.memory :]]
        others = np.random.default_rng([self.seed, *name.encode(), *latest]).standard_normal(self.width - 2)
        return np.array([position, token_ids[-1], *others], dtype=np.float32)

    def _shift(self, shifts: list[int]) -> Any:
        """The effect on a row of the kernels that read the tokens so far. It is as large as another precision's."""
        if not any(shifts):
            return np.float32(0)
        return (
            np.random.default_rng(abs(hash(tuple(shifts)))).normal(scale=0.3, size=self.vocab_size).astype(np.float32)
        )

    @dataclass(frozen=True, slots=True)
    class Step:
        """Rows and hidden states of each chunk, in memory."""

        logits: dict[Chunk, list[NDArray[np.float32]]]
        hidden: dict[Chunk, NDArray[np.float32]] = field(default_factory=dict)
        done = True

        def wait(self) -> FakeBackend.Step:
            """Return at once."""
            return self

        def rows(self, chunk: Chunk) -> list[LogitsRow]:
            """The rows that the chunk asked for."""
            return [LogitsRow.of(row) for row in self.logits[chunk]]

        def features(self, chunk: Chunk) -> NDArray[np.float32]:
            """The hidden states that the chunk asked for."""
            return self.hidden[chunk]
