"""Models for tests: small, random, and ready in milliseconds.

    from outrider.testing import FakeBackend, ToyTokenizer, save_toy_bundle

    bundle = save_toy_bundle(tmp_path)                       # a real main and draft model of 40 tokens
    engine = outrider.Engine(bundle, tokenizer=ToyTokenizer())
    engine.generate("abc", max_new_tokens=20).text

`save_toy_bundle` writes real decoders that go through the real backend; `FakeBackend` is NumPy alone. Their text means
nothing, but every promise that Outrider makes can be checked on them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from outrider import __version__
from outrider.bundle import (
    BYTES_NAME,
    MAP_NAME,
    PROPOSED_NAME,
    SCHEMA_VERSION,
    Bundle,
    DrafterEntry,
    Geometry,
    Manifest,
    ModelEntry,
    Source,
    TokenizerEntry,
    list_files,
    read_bundle,
    vocabulary_sha256,
    write_manifest,
)
from outrider.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq
    from pathlib import Path

    import openvino as ov
    from numpy.typing import NDArray

    from outrider.types import Chunk, Logits

TOY_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .é\0"
_HIDDEN, _HEADS, _LAYERS, _CONTEXT = 16, 2, 2, 2048


class ToyTokenizer:
    """Tokens that stand for `tokens`: by default one character each, those of `TOY_ALPHABET` in id order.

    "é" is there to be two bytes, "\\0" to end an answer. A text is encoded from left to right, with the longest token
    that fits; what no token fits is an error, or left out where `tokens` are given.
    """

    has_chat_template = False
    eos_token_id = len(TOY_ALPHABET) - 1
    prefix = ()

    def __init__(self, tokens: Seq[bytes] | None = None) -> None:
        self._strict = tokens is None
        self._tokens = toy_tokens() if tokens is None else list(tokens)
        self._longest_first = sorted(range(len(self._tokens)), key=lambda i: -len(self._tokens[i]))

    def encode_prompt(
        self,
        prompt: str | Seq[Mapping[str, Any]] | Seq[int],
        *,
        chat_template: bool = True,  # noqa: ARG002
    ) -> list[int]:
        """Token ids of a text; other prompts must be token ids already."""
        items: Any = self.encode(prompt) if isinstance(prompt, str) else prompt
        return [int(item) for item in items]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        left, token_ids = text.encode(), []
        while left:
            fitting = (i for i in self._longest_first if self._tokens[i] and left.startswith(self._tokens[i]))
            if (token_id := next(fitting, None)) is not None:
                token_ids.append(token_id)
            elif self._strict:
                raise ValueError(f"{text!r} is not in the toy alphabet")
            left = left[1 if token_id is None else len(self._tokens[token_id]) :]
        return token_ids

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of tokens, the end left out."""
        return b"".join(self._tokens[i] for i in token_ids).decode(errors="replace").replace("\0", "")


def toy_tokens() -> list[bytes]:
    """The tokens of `TOY_ALPHABET`, as bytes."""
    return [character.encode() for character in TOY_ALPHABET]


def save_toy_bundle(
    folder: Path,
    *,
    vocab_size: int = len(TOY_ALPHABET),
    seed: int = 0,
    draft_noise: float = 0.1,
    draft: bool = True,
    padded: bool = True,
    tokenizer: Path | None = None,
    tokens: Seq[bytes] | None = None,
    draft_tokens: Seq[bytes] | None = None,
    vocabulary: Literal["intersection", "text"] = "intersection",
    proposed: Seq[int] | None = None,
) -> Bundle:
    """A bundle of two random decoders, without tokenizer files unless `tokenizer` names a folder to copy them from.

    draft_noise: how far the draft model's weights are from the main model's; 0 makes them the same. padded: both
    give more logits than there are tokens, as real models do. draft_tokens: gives the draft model a vocabulary of its
    own, which it drafts with by way of `vocabulary`; a token that is among the main model's `tokens` (by default
    `toy_tokens()`) has the same weights in both. The last of each ends an answer. proposed: draft ids, ascending,
    that the draft model's output matrix is cut to.
    """
    tokens = toy_tokens() if tokens is None else tokens
    to_main = None
    if draft_tokens is not None:
        vocab_size = len(tokens)
        to_main = np.array([tokens.index(token) if token in tokens else -1 for token in draft_tokens], dtype=np.int32)
    if tokenizer:
        shutil.copytree(tokenizer, folder / "tokenizer")
    roles = {"main": 0.0} | ({"draft": draft_noise} if draft else {})
    padding = {"main": 8, "draft": 3} if padded else {"main": 0, "draft": 0}
    sizes = {"main": vocab_size, "draft": vocab_size if draft_tokens is None else len(draft_tokens)}
    for role, noise in roles.items():
        (folder / role).mkdir(parents=True)
        chosen = to_main if role == "draft" else None
        save_toy_model(
            folder / role,
            vocab_size=vocab_size,
            padding=padding[role],
            seed=seed,
            noise=noise,
            to_main=chosen,
            proposed=proposed if role == "draft" else None,
        )
    widths = {role: sizes[role] + padding[role] for role in roles}
    if proposed is not None:
        widths["draft"] = len(proposed)
        np.save(folder / "draft" / PROPOSED_NAME, np.array(proposed, dtype=np.int32))
    entries = {
        role: ModelEntry(
            folder=role,
            format="openvino",
            weights="fp32",
            geometry=Geometry("toy", _LAYERS, _HEADS, _HEADS, _HIDDEN // _HEADS, _HIDDEN, _CONTEXT, widths[role]),
            vocab_size=sizes[role],
            vocab_sha256=vocabulary_sha256(str(i) for i in range(sizes[role])),
            source=Source("toy", "folder"),
        )
        for role in roles
    }
    drafters = [DrafterEntry("draft", "draft_model", entry) for role, entry in entries.items() if role != "main"]
    if draft_tokens is not None and to_main is not None:
        own = TokenizerEntry("draft-tokenizer", (len(draft_tokens) - 1,), (len(draft_tokens) - 1,))
        num_shared = int((to_main >= 0).sum())
        drafters = [DrafterEntry("draft", "draft_model", entries["draft"], vocabulary, num_shared, own)]
        np.save(folder / "draft" / MAP_NAME, to_main)
        for name, of in (("tokenizer", tokens), (own.folder, draft_tokens)):
            (folder / name).mkdir()
            (folder / name / BYTES_NAME).write_bytes(msgspec.msgpack.encode(list(of)))
    if proposed is not None:
        drafters = [msgspec.structs.replace(drafters[0], num_proposed_tokens=len(proposed))]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        minimum_runtime=__version__,
        created_by=f"outrider {__version__}",
        main=entries["main"],
        drafters=tuple(drafters),
        tokenizer=TokenizerEntry("tokenizer", eos_token_ids=(vocab_size - 1,)),
        files=list_files(folder),
    )
    write_manifest(folder, manifest)
    return read_bundle(folder)


def save_toy_model(
    folder: Path,
    *,
    vocab_size: int,
    padding: int = 0,
    seed: int = 0,
    noise: float = 0.0,
    to_main: NDArray[np.int32] | None = None,
    proposed: Seq[int] | None = None,
) -> None:
    """A random decoder as stateful IR, of the shape that optimum-intel writes, with `padding` logits too many.

    to_main: makes it a model of len(to_main) tokens, which has the weights of these of the `vocab_size` ones, and
    random ones where it is −1. proposed: gives it the logits of these ids alone.
    """
    import openvino as ov

    model = _toy_model(vocab_size, padding, seed, noise, to_main, proposed)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def _toy_model(
    vocab_size: int,
    padding: int,
    seed: int,
    noise: float,
    to_main: NDArray[np.int32] | None,
    proposed: Seq[int] | None,
) -> ov.Model:
    """Two layers of attention and tanh, with learned positions; weights are standard normal, scaled by fan-in."""
    import openvino as ov
    from openvino import opset13 as ops

    shared, own = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    head_size = _HIDDEN // _HEADS

    def scalar(value: int) -> Any:
        return ops.constant(np.int64(value))

    def ints(*values: int) -> Any:
        return ops.constant(np.array(values, dtype=np.int64))

    axis0, heads_first = scalar(0), ints(0, 2, 1, 3)

    def random(rows: int, columns: int, scale: float | None = None) -> NDArray[np.float32]:
        values = shared.standard_normal((rows, columns)) + noise * own.standard_normal((rows, columns))
        return (values * (scale or rows**-0.5)).astype(np.float32)

    def weights(rows: int, columns: int, scale: float | None = None) -> Any:
        return ops.constant(random(rows, columns, scale))

    def product(x: Any, columns: int) -> Any:
        return ops.matmul(x, weights(x.get_output_partial_shape(0)[2].get_length(), columns), False, False)

    def parameter(name: str, rank: int, kind: Any) -> Any:
        made = ops.parameter([-1] * rank, kind, name=name)
        made.output(0).set_names({name})
        return made

    def of_tokens(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows of the model's own tokens, float32 [own vocab, hidden], from those of all."""
        if to_main is None:
            return rows
        others = np.random.default_rng(seed + 2).standard_normal((len(to_main), rows.shape[1]))
        return np.where(to_main[:, None] >= 0, rows[to_main], others * rows.std()).astype(np.float32)

    input_ids = parameter("input_ids", 2, np.int64)
    attention_mask = parameter("attention_mask", 2, np.int64)
    position_ids = parameter("position_ids", 2, np.int64)
    beam_idx = parameter("beam_idx", 1, np.int32)

    embedded = ops.gather(ops.constant(of_tokens(random(vocab_size, _HIDDEN, 1.0))), input_ids, axis0)
    placed = ops.gather(weights(_CONTEXT + 1, _HIDDEN, 1.0), position_ids, axis0)
    x = ops.add(embedded, placed)
    batch = ops.gather(ops.shape_of(input_ids), ints(0), axis0)
    empty_shape = ops.concat([batch, ints(_HEADS, 0, head_size)], 0)
    empty = ops.broadcast(ops.constant(np.float32(0)), empty_shape)
    length = ops.gather(ops.shape_of(attention_mask), scalar(1), axis0)
    columns = ops.range(scalar(0), length, scalar(1), output_type="i64")
    seen = ops.less_equal(
        ops.unsqueeze(columns, ints(0, 1, 2)),
        ops.unsqueeze(position_ids, ints(1, 3)),
    )
    mask = ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(-1e9)))
    assigned = []

    def heads(x: Any) -> Any:
        split = ops.reshape(product(x, _HIDDEN), ints(0, 0, _HEADS, head_size), True)
        return ops.transpose(split, heads_first)

    def cached(values: Any, name: str) -> Any:
        past = ov.opset6.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, _HEADS, -1, head_size]))
        whole = ops.concat([ops.gather(past, beam_idx, axis0), values], 2)
        assigned.append(ov.opset6.assign(whole, name))
        return whole

    for layer in range(_LAYERS):
        query, key, value = heads(x), cached(heads(x), f"past_key_{layer}"), cached(heads(x), f"past_value_{layer}")
        attended = ops.transpose(ops.scaled_dot_product_attention(query, key, value, mask), heads_first)
        x = ops.add(x, product(ops.reshape(attended, ints(0, 0, _HIDDEN), True), _HIDDEN))
        x = ops.add(x, product(ops.tanh(product(x, 2 * _HIDDEN)), _HIDDEN))
        mean_square = ops.reduce_mean(ops.multiply(x, x), ints(2), True)
        x = ops.divide(x, ops.sqrt(mean_square))
    # The padding's logits are large, so that it shows if they are not masked.
    real = of_tokens(random(_HIDDEN, vocab_size).T).T
    output_matrix = np.concatenate([real, random(_HIDDEN, padding, 20.0)], axis=1)
    if proposed is not None:
        output_matrix = output_matrix[:, list(proposed)]
    doubled = ops.multiply(x, ops.constant(np.float32(2)))
    logits = ops.matmul(doubled, ops.constant(output_matrix), False, False)
    logits.output(0).set_names({"logits"})
    inputs = [input_ids, attention_mask, position_ids, beam_idx]
    return ov.Model([ops.result(logits)], assigned, inputs, "toy")


@dataclass(slots=True)
class FakeSlot:
    """The tokens themselves stand for their keys and values."""

    backend: FakeBackend
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left."""
        del self.token_ids[length:]

    def skip_to(self, length: int) -> None:
        """Take `length` tokens to be in the cache."""
        self.token_ids = [0] * length

    def close(self) -> None:
        """Give the place back."""
        self.closed = True


class FakeBackend:
    """A model whose logits are a fixed random function of the last `memory` tokens and the position.

        backend = FakeBackend(vocab_size=16, seed=1)

    noise: how far it is from the noiseless model of the same seed, for drafts that are right now and then. Fails the
    test that uses it when a slot is overfilled, appears twice in a call, or is used after it was closed.
    """

    capabilities = Capabilities(bit_exact_batching=True, min_rows=1)

    def __init__(self, vocab_size: int, *, seed: int = 0, noise: float = 0.0, memory: int = 2) -> None:
        self.vocab_size, self.seed, self.noise, self.memory = vocab_size, seed, noise, memory
        self.seconds = 0.0
        self.max_tokens = _CONTEXT
        self.calls: list[list[int]] = []  # for every call, how many tokens each chunk had

    def open(self, max_tokens: int) -> FakeSlot:
        """A slot; there is always room."""
        return FakeSlot(self, max_tokens)

    def submit(self, chunks: Seq[Chunk]) -> FakeBackend.Step:
        """Evaluate chunks at once; the step is its own pending."""
        self.calls.append([len(chunk.token_ids) for chunk in chunks])
        if len({id(chunk.slot) for chunk in chunks}) != len(chunks):
            raise AssertionError("a slot appears twice in one call")
        rows = []
        for chunk in chunks:
            slot: FakeSlot = chunk.slot
            if slot.closed or slot.backend is not self or slot.length + len(chunk.token_ids) > slot.max_tokens:
                raise AssertionError(f"slot closed, foreign or overfilled: {slot}")
            for i, token_id in enumerate(chunk.token_ids, 1):
                slot.token_ids.append(token_id)
                if i > len(chunk.token_ids) - chunk.num_rows:
                    rows.append(self.logits_after(slot.token_ids))
        return FakeBackend.Step(rows)

    def logits_after(self, token_ids: Seq[int]) -> Logits:
        """float32 [vocab_size] for the token behind these."""
        key = [len(token_ids), *token_ids[-self.memory :]]

        def normal(seed: int) -> Any:
            return np.random.default_rng([seed, *key]).standard_normal(self.vocab_size)

        own = self.noise * normal(self.seed + 1) if self.noise else 0
        logits: Logits = (2 * (normal(self.seed) + own)).astype(np.float32)
        return logits

    @dataclass(frozen=True, slots=True)
    class Step:
        """Rows that are there already."""

        rows: list[NDArray[np.float32]]

        def wait(self) -> FakeBackend.Step:
            """There is nothing to wait for."""
            return self

        def logits(self, i: int) -> Logits:
            """Row i."""
            row: Logits = self.rows[i]
            return row
