"""A toy encoder-decoder bundle, written by hand as `outrider export` writes them, without torch."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.bundle import Bundle, read_bundle
from outrider.bundle.hashes import list_files, vocabulary_sha256
from outrider.bundle.manifest import (
    CROSS_NAME,
    SCHEMA_VERSION,
    AudioEntry,
    DrafterEntry,
    EncoderEntry,
    Geometry,
    Manifest,
    ModelEntry,
    Source,
    TokenizerEntry,
    write_manifest,
)
from outrider.testing import ToyTokenizer, toy_tokens
from outrider.version import __version__

HEADS, SIZE, CONTEXT = 2, 16, 512
HIDDEN = HEADS * SIZE
VOCAB = 39  # of ToyTokenizer, whose last token ends an answer
START = VOCAB - 2

# A Whisper of windows of a second, whose special tokens follow the toy tokenizer's.
AUDIO_START, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS, FIRST_STAMP = 39, 44, 45, 46, 47
WINDOW = 50  # positions of 0.02 s
AUDIO_VOCAB = FIRST_STAMP + WINDOW + 1
AUDIO = AudioEntry(
    16_000, 80, 400, 160, 1, NO_TIMESTAMPS, FIRST_STAMP, WINDOW, {"en": 40, "de": 41},
    {"transcribe": 42, "translate": 43}, NO_SPEECH, PREVIOUS,
)  # fmt: skip
WHISPER = EncoderEntry(
    "encoder", "audio", 1, HIDDEN, WINDOW, "2" * 64, (AUDIO_START,), (*range(AUDIO_START, NO_TIMESTAMPS),), (), AUDIO
)


def save_whisper(folder: Path) -> Bundle:
    """A random Whisper, and a draft model with its encoder whose decoder differs a little."""
    return save_encoder_decoder(folder, is_whisper=True)


def whisper_tokenizer() -> ToyTokenizer:
    """The tokenizer of `save_whisper`, whose special tokens are text like others."""
    return ToyTokenizer([*toy_tokens(), *(f"<{i}>".encode() for i in range(VOCAB, AUDIO_VOCAB))])


def save_encoder_decoder(folder: Path, *, same_encoder: bool = True, is_whisper: bool = False) -> Bundle:
    """A random main model, and a draft model whose decoder differs a little. same_encoder: the draft has the main's."""
    vocab = AUDIO_VOCAB if is_whisper else VOCAB
    roles = {"main": 0.0, "draft": 0.1}
    entries = {}
    for role, noise in roles.items():
        weights = _Weights(noise)
        own = role == "main" or not same_encoder
        encoder = "encoder" if role == "main" or same_encoder else "draft-encoder"
        _save(decoder(weights, vocab), folder / role / "openvino_model.xml")
        _save(cross(weights), folder / role / CROSS_NAME)
        if own:
            _save(listener_of(weights) if is_whisper else encoder_of(weights), folder / encoder / "openvino_model.xml")
        entry = EncoderEntry(encoder, "text", 1, HIDDEN, 64, ("0" if encoder == "encoder" else "1") * 64, (START,))
        entry = WHISPER if is_whisper else entry
        geometry = Geometry("toy", 1, HEADS, HEADS, SIZE, HIDDEN, CONTEXT, vocab)
        sha256 = vocabulary_sha256(map(str, range(vocab)))
        entries[role] = ModelEntry(
            role, "openvino", "fp32", geometry, vocab, sha256, Source("toy", "folder"), encoder=entry
        )
    manifest = Manifest(
        SCHEMA_VERSION,
        __version__,
        f"outrider {__version__}",
        entries["main"],
        (DrafterEntry("draft", "draft_model", entries["draft"]),),
        TokenizerEntry("tokenizer", eos_token_ids=(VOCAB - 1,)),
        list_files(folder),
    )
    write_manifest(folder, manifest)
    return read_bundle(folder)


class _Weights:
    """Named random matrices, the same in every model but for `noise`."""

    def __init__(self, noise: float) -> None:
        self._noise = noise

    def __call__(self, name: str, *shape: int, scale: float = 0.5) -> ov.Node:
        own = np.random.default_rng([*name.encode()])
        values = own.normal(scale=scale, size=shape)
        other = np.random.default_rng([1, *name.encode()]).normal(scale=scale, size=shape)
        return ops.constant((values + self._noise * other).astype(np.float32))


def decoder(weights: _Weights, vocab: int = VOCAB) -> ov.Model:
    """One layer: self-attention, cross-attention, tanh."""
    token_ids, rows = _input("input_ids", [1, -1], np.int64), _input("rows", [-1], np.int64)
    pad = _input("pad", [-1, HEADS, SIZE])
    pasts = {kind: _input(f"past.0.{kind}", [-1, HEADS, SIZE]) for kind in ("key", "value")}
    crosses = {kind: _input(f"cross.0.{kind}", [1, HEADS, -1, SIZE]) for kind in ("key", "value")}
    length, count = _length(pasts["key"], 0), _length(token_ids, 1)
    positions = ops.range(length, ops.add(length, count), ops.constant(np.int64(1)), "i64")
    states = ops.add(_rows(weights("embedding", vocab, HIDDEN), token_ids), _rows(_positions(), positions))
    new = {kind: _heads(ops.matmul(states, weights(kind, HIDDEN, HIDDEN), False, False)) for kind in pasts}
    joined = {kind: ops.concat([_heads_first(past), new[kind], _heads_first(pad)], 2) for kind, past in pasts.items()}
    keys = ops.range(ops.constant(np.int64(0)), _length(joined["key"], 2), ops.constant(np.int64(1)), "i64")
    seen = ops.less_equal(ops.unsqueeze(keys, _ints(0)), ops.unsqueeze(positions, _ints(1)))
    mask = ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.finfo(np.float32).min))
    query = _heads(ops.matmul(states, weights("query", HIDDEN, HIDDEN), False, False))
    mask = ops.unsqueeze(mask, _ints(0, 1))
    own = ops.scaled_dot_product_attention(query, joined["key"], joined["value"], mask)
    states = ops.add(states, _merged(own))
    query = _heads(ops.matmul(states, weights("cross query", HIDDEN, HIDDEN), False, False))
    other = ops.scaled_dot_product_attention(query, crosses["key"], crosses["value"])
    states = ops.tanh(ops.add(states, _merged(other)))
    chosen = ops.gather(states, rows, ops.constant(np.int64(1)))
    logits = ops.matmul(chosen, weights("output", HIDDEN, vocab), False, False)
    outputs = {"logits": logits}
    for kind, values in new.items():
        outputs[f"new.0.{kind}"] = ops.squeeze(ops.transpose(values, _ints(2, 0, 1, 3)), _ints(1))
    return _model(outputs, [token_ids, rows, pad, *pasts.values(), *crosses.values()])


def cross(weights: _Weights) -> ov.Model:
    """Keys and values of cross-attention."""
    states = _input("encoder_hidden_states", [1, -1, HIDDEN])
    made = {
        f"cross.0.{kind}": _heads(ops.matmul(states, weights(f"cross {kind}", HIDDEN, HIDDEN), False, False))
        for kind in ("key", "value")
    }
    return _model(made, [states])


def encoder_of(weights: _Weights) -> ov.Model:
    """Each token beside the ones next to it would be too much for a toy: each token for itself."""
    token_ids = _input("input_ids", [1, -1], np.int64)
    return _model({"last_hidden_state": _rows(weights("source", VOCAB, HIDDEN, scale=1.0), token_ids)}, [token_ids])


def listener_of(weights: _Weights) -> ov.Model:
    """The features of every other frame."""
    features = _input("input_features", [1, AUDIO.num_mel_bins, 2 * WINDOW])
    states = ops.strided_slice(
        ops.transpose(features, _ints(0, 2, 1)), _ints(0, 0, 0), _ints(0, 0, 0), _ints(1, 2, 1), [1, 1, 1], [1, 1, 1]
    )
    made = ops.matmul(states, weights("features", AUDIO.num_mel_bins, HIDDEN), False, False)
    return _model({"last_hidden_state": made}, [features])


def _positions() -> ov.Node:
    angles = np.arange(2 * CONTEXT)[:, None] / 30 ** (np.arange(HIDDEN) / HIDDEN)
    return ops.constant(np.sin(angles).astype(np.float32))


def _input(name: str, shape: list[int], kind: Any = np.float32) -> ov.Node:
    node = ops.parameter(shape, dtype=kind, name=name)
    node.output(0).set_names({name})
    return node


def _model(outputs: dict[str, ov.Node], inputs: list[ov.Node]) -> ov.Model:
    results = []
    for name, node in outputs.items():
        result = ops.result(node)
        result.output(0).set_names({name})
        results.append(result)
    return ov.Model(results, inputs, "toy")


def _rows(table: ov.Node, indices: ov.Node) -> ov.Node:
    return ops.gather(table, indices, ops.constant(np.int64(0)))


def _length(node: ov.Node, axis: int) -> ov.Node:
    return ops.gather(ops.shape_of(node), ops.constant(np.int64(axis)), ops.constant(np.int64(0)))


def _heads(states: ov.Node) -> ov.Node:
    return ops.transpose(ops.reshape(states, _ints(1, -1, HEADS, SIZE), special_zero=False), _ints(0, 2, 1, 3))


def _heads_first(rows: ov.Node) -> ov.Node:
    return ops.transpose(ops.unsqueeze(rows, _ints(1)), _ints(1, 2, 0, 3))


def _merged(heads: ov.Node) -> ov.Node:
    return ops.reshape(ops.transpose(heads, _ints(0, 2, 1, 3)), _ints(1, -1, HIDDEN), special_zero=False)


def _ints(*numbers: int) -> ov.Node:
    return ops.constant(np.array(numbers, dtype=np.int64))


def _save(model: ov.Model, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, path, compress_to_fp16=False)
