"""Toy models on disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

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
    if tokenizer:
        shutil.copytree(tokenizer, folder / "tokenizer")
    if draft_tokens is not None:
        vocab_size = len(tokens)
    same = {"vocab_size": vocab_size, "seed": seed, "states": states}
    main = _save_role(folder, "main", padding=8 if padded else 0, format=formats[0], **same)
    drafters: list[DrafterEntry] = []
    if draft:
        to_main = None if draft_tokens is None else _ids_of(draft_tokens, tokens)
        own = {"noise": draft_noise, "to_main": to_main, "proposed": proposed}
        model = _save_role(folder, "draft", padding=3 if padded else 0, format=formats[1], **same, **own)
        num_proposed = None if proposed is None else len(proposed)
        drafters = [DrafterEntry("draft", "draft_model", model, num_proposed_tokens=num_proposed)]
        if draft_tokens is not None and to_main is not None:
            drafters = [_with_own_tokens(folder, drafters[0], to_main, vocabulary, tokens, draft_tokens)]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        minimum_runtime=__version__,
        created_by=f"outrider {__version__}",
        main=main,
        drafters=tuple(drafters),
        tokenizer=TokenizerEntry("tokenizer", eos_token_ids=(vocab_size - 1,)),
        files=list_files(folder),
    )
    write_manifest(folder, manifest)
    return read_bundle(folder)


def _ids_of(draft_tokens: Sequence[bytes], tokens: Sequence[bytes]) -> NDArray[np.int32]:
    """The main model's id of each draft token, or −1."""
    return np.array([tokens.index(token) if token in tokens else -1 for token in draft_tokens], dtype=np.int32)


def _save_role(folder: Path, role: str, **options: Any) -> ModelEntry:
    """Save one of the models, and describe it. options: as `save_toy_model` has them."""
    (folder / role).mkdir(parents=True)
    save_toy_model(folder / role, **options)
    to_main, proposed = options.get("to_main"), options.get("proposed")
    size = options["vocab_size"] if to_main is None else len(to_main)
    width = size + options["padding"]
    if proposed is not None:
        width = len(proposed)
        np.save(folder / role / PROPOSED_NAME, np.array(proposed, dtype=np.int32))
    layer_states: tuple[StateKind, ...] = ("short_convolution", "") * LAYERS if options["states"] else ()
    layers = len(layer_states) or LAYERS
    return ModelEntry(
        folder=role,
        format=options["format"],
        weights="fp32",
        geometry=Geometry("toy", layers, HEADS, HEADS, HEAD_SIZE, HIDDEN, CONTEXT, width, layer_states=layer_states),
        vocab_size=size,
        vocab_sha256=vocabulary_sha256(str(i) for i in range(size)),
        source=Source("toy", "folder"),
    )


def _with_own_tokens(
    folder: Path,
    drafter: DrafterEntry,
    to_main: NDArray[np.int32],
    vocabulary: Literal["intersection", "text"],
    tokens: Sequence[bytes],
    draft_tokens: Sequence[bytes],
) -> DrafterEntry:
    """The drafter with tokens of its own. Saves both models' tokens, and the map between them."""
    own = TokenizerEntry("draft-tokenizer", (len(draft_tokens) - 1,), (len(draft_tokens) - 1,))
    np.save(folder / "draft" / MAP_NAME, to_main)
    for name, of in (("tokenizer", tokens), (own.folder, draft_tokens)):
        (folder / name).mkdir()
        (folder / name / BYTES_NAME).write_bytes(msgspec.msgpack.encode(list(of)))
    num_shared = int((to_main >= 0).sum())
    return msgspec.structs.replace(drafter, vocabulary=vocabulary, num_shared_tokens=num_shared, tokenizer=own)


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
