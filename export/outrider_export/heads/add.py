"""Adds a drafter that reads the main model's hidden states to a bundle: `outrider add`.

    bundle = add_drafter("my-bundle", "my-eagle3", name="eagle3")

The bundle is written anew, with links to the old one's files where the disk allows it, and then takes its place.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import openvino as ov

from outrider import __version__
from outrider.backends.taps import hidden_states_of, output_matrix_of, read_ir
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import (
    MODEL_NAMES,
    PROPOSED_NAME,
    DrafterEntry,
    Geometry,
    ModelEntry,
    Source,
    write_manifest,
)
from outrider.errors import ExportError, OptionError, nearest
from outrider_export.diet import choose_tokens
from outrider_export.heads import container, onnx_main
from outrider_export.heads.formats import MATRIX, Head, check_features, read_head
from outrider_export.output_matrix import cut_output
from outrider_export.plan import check_extra
from outrider_export.progress import Silent
from outrider_export.sources import fetch, locate
from outrider_export.target import Target
from outrider_export.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider_export.progress import Progress
    from outrider_export.sources import Located

WEIGHTS = ("int8", "fp16", "fp32")


def add_drafter(
    bundle: str | Path,
    drafter: str | Path,
    *,
    name: str | None = None,
    weights: str = "int8",
    draft_vocab: int | str | None = None,
    draft_vocab_corpus: str | Path | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Add a drafter to a bundle in place. Nothing is changed if that fails.

    drafter: a checkpoint folder or hub id in one of the formats of `outrider_export.heads.formats`. name: by default
    its kind. draft_vocab: the number of tokens that it proposes with the main model's output matrix, or "all".

    Raises:
        OptionError: for an invalid option, or a name that is taken.
        BundleError: when the bundle cannot be read.
        ExportError: when the drafter is unknown, damaged or does not fit, or the bundle cannot be written.
    """
    progress = progress or Silent()
    if weights not in WEIGHTS:
        raise OptionError(f"weights={weights!r} is not a weight format here. {nearest(weights, WEIGHTS)}")
    old = read_bundle(bundle)
    main = old.manifest.main
    check_extra("Adding a drafter", main.format)
    source = fetch(locate(drafter, revision), False, progress)
    if source.path is None or not source.path.is_dir():
        raise ExportError(f"{drafter} is not a checkpoint folder. Name the one with the drafter's config.json.")
    head = read_head(source.path, main.geometry)
    name = name or head.kind
    if name in (taken := [each.name for each in old.manifest.drafters]):
        raise OptionError(f"The bundle has a drafter {name!r} already ({', '.join(taken)}). Choose another name.")
    tokens = None
    if head.uses_main_matrix:
        vocabulary = Vocabulary.of_folder(old.tokenizer_path)
        tokens = choose_tokens(vocabulary, old.manifest, draft_vocab, draft_vocab_corpus, old.tokenizer_path, progress)
    try:
        with Target(old.folder, overwrite=True) as target:
            progress.phase("convert")
            for path in old.folder.rglob("*"):
                _link(path, target.new / path.relative_to(old.folder))
            entry = write_head(target.new, main, head, name, weights, tokens, source)
            manifest = msgspec.structs.replace(
                old.manifest, drafters=(*old.manifest.drafters, entry), minimum_runtime=__version__
            )
            progress.phase("hash")
            write_manifest(target.new, msgspec.structs.replace(manifest, files=list_files(target.new)))
            read_bundle(target.new)
            target.commit()
    except OSError as error:
        raise ExportError(f"{old.folder} cannot be written: {error}.") from error
    return read_bundle(old.folder)


def write_head(
    folder: Path,
    main: ModelEntry,
    head: Head,
    name: str,
    weights: str,
    tokens: NDArray[np.int32] | None,
    source: Located,
) -> DrafterEntry:
    """Write a drafter into the bundle's folder `folder`, and describe it.

    tokens: int32 [n], the rows of the main model's output matrix that it uses; None for all.

    Raises:
        ExportError: when the main model's graph does not have the hidden states.
    """
    path = folder / main.folder / MODEL_NAMES[main.format][0]
    tensors = head.tensors | {key: np.array([value], dtype=np.float32) for key, value in head.numbers.items()}
    shared: dict[str, ov.Output] = {}
    if main.format == "onnx":
        tensors |= onnx_main.share(path, main.geometry, head, tokens)
    else:
        shared = _share(path, main.geometry, head, tokens)
    proposed = tokens if head.uses_main_matrix else head.proposed
    container.write(folder / name / MODEL_NAMES["openvino"][0], tensors, shared, weights)
    if proposed is not None:
        np.save(folder / name / PROPOSED_NAME, proposed)
    width = len(proposed) if proposed is not None else main.geometry.logits_width
    return DrafterEntry(
        name=name,
        kind=head.kind,  # type: ignore[arg-type]  # one of `KINDS`
        model=ModelEntry(
            folder=name,
            format="openvino",
            weights=weights,
            geometry=Geometry(
                architecture=head.kind,
                num_layers=head.num_layers,
                num_heads=head.num_heads,
                num_kv_heads=head.num_kv_heads,
                head_size=head.head_size,
                hidden_size=head.hidden_size,
                context_length=head.context_length,
                logits_width=width,
            ),
            vocab_size=main.vocab_size,
            vocab_sha256=main.vocab_sha256,
            source=Source(id=source.id, kind=source.kind, revision=source.revision, recipe={"route": "drafter"}),
        ),
        num_proposed_tokens=None if proposed is None else len(proposed),
        features=head.features,
        num_places=head.num_places,
        mask_token_id=head.mask_token_id,
    )


def _share(path: Path, geometry: Geometry, head: Head, tokens: NDArray[np.int32] | None) -> dict[str, ov.Output]:
    """Check that an IR has a drafter's hidden states, and return its output matrix if it is cut to `tokens`.

    All else is read from the IR at load.
    """
    model = read_ir(ov.Core(), path)
    check_features(head, hidden_states_of(model, geometry.num_layers), geometry.num_layers)
    if tokens is None:
        return {}
    cut_output(model, tokens)
    matrix = output_matrix_of(model)
    if matrix is None:
        raise AssertionError("`cut_output` has found it")
    return {MATRIX: matrix.input_value(1)}


def _link(old: Path, new: Path) -> None:
    """Link a file, or copy it where links are impossible. Make a folder."""
    if old.is_dir():
        new.mkdir(parents=True, exist_ok=True)
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
