"""Toy models on disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files, vocabulary_sha256
from outrider.bundle.manifest import (
    BYTES_NAME,
    MAP_NAME,
    MODEL_NAMES,
    PROPOSED_NAME,
    SCHEMA_VERSION,
    DrafterEntry,
    Format,
    Geometry,
    Manifest,
    ModelEntry,
    Source,
    StateKind,
    TokenizerEntry,
    write_manifest,
)
from outrider.testing.tokenizer import TOY_ALPHABET, toy_tokens
from outrider.testing.weights import CONTEXT, HEAD_SIZE, HEADS, HIDDEN, LAYERS, random_weights
from outrider.version import __version__


def save_toy_bundle(
    folder: Path,
    *,
    vocab_size: int = len(TOY_ALPHABET),
    seed: int = 0,
    draft_noise: float = 0.1,
    draft: bool = True,
    padded: bool = True,
    tokenizer: Path | None = None,
    tokens: Sequence[bytes] | None = None,
    draft_tokens: Sequence[bytes] | None = None,
    vocabulary: Literal["intersection", "text"] = "intersection",
    proposed: Sequence[int] | None = None,
    formats: tuple[Format, Format] = ("openvino", "openvino"),
    states: bool = False,
) -> Bundle:
    """A bundle of two random decoders, without tokenizer files unless `tokenizer` names a folder to copy them from.

    draft_noise: difference of the draft model's weights from the main model's; 0 makes them equal. padded: both have
    more logits than tokens, as real models do. draft_tokens: the draft model's own vocabulary, converted by
    `vocabulary`. Tokens that are also among the main model's `tokens` (by default `toy_tokens()`) have the same weights
    in both. The last token of each ends an answer. proposed: draft ids, ascending, that the draft model's output matrix
    is cut to. formats: of main and draft model; "onnx" needs the package onnx. states: whether every other layer has
    a short convolution instead of attention, in both.
    """
    tokens = toy_tokens() if tokens is None else tokens
    to_main = None
    if draft_tokens is not None:
        vocab_size = len(tokens)
        to_main = np.array([tokens.index(token) if token in tokens else -1 for token in draft_tokens], dtype=np.int32)
    if tokenizer:
        shutil.copytree(tokenizer, folder / "tokenizer")
    roles = {"main": 0.0} | ({"draft": draft_noise} if draft else {})
    format_of: dict[str, Format] = {"main": formats[0], "draft": formats[1]}
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
            format=format_of[role],
            states=states,
        )
    layer_states: tuple[StateKind, ...] = ("short_convolution", "") * LAYERS if states else ()
    num_layers = len(layer_states) or LAYERS
    widths = {role: sizes[role] + padding[role] for role in roles}
    if proposed is not None:
        widths["draft"] = len(proposed)
        np.save(folder / "draft" / PROPOSED_NAME, np.array(proposed, dtype=np.int32))
    entries = {
        role: ModelEntry(
            folder=role,
            format=format_of[role],
            weights="fp32",
            geometry=Geometry(
                "toy", num_layers, HEADS, HEADS, HEAD_SIZE, HIDDEN, CONTEXT, widths[role], layer_states=layer_states
            ),
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
    proposed: Sequence[int] | None = None,
    format: Format = "openvino",  # noqa: A002 - as the manifest calls it
    states: bool = False,
) -> None:
    """A random decoder with `padding` extra logits: two layers of attention and tanh.

    to_main: makes a model of len(to_main) tokens, with the weights of these ids out of `vocab_size`, and random weights
    for −1. proposed: cuts the logits to these ids. format: "onnx" needs the package onnx. states: as `save_toy_bundle`
    has it.
    """
    weights = random_weights(vocab_size, padding, seed, noise, to_main, proposed, states)
    path = folder / MODEL_NAMES[format][0]
    if format == "onnx":
        import onnx

        from outrider.testing.onnx_toy import onnx_toy

        onnx.save(onnx_toy(weights), path)
    else:
        import openvino as ov

        from outrider.testing.openvino_toy import openvino_toy

        ov.save_model(openvino_toy(weights), path, compress_to_fp16=False)
