"""Adds a drafter that reads the main model's hidden states to a bundle: `outrider add`.

    bundle = add_drafter("my-bundle", "my-eagle3", name="eagle3")

The bundle is written anew, with links to the old one's files where the disk allows it, and then takes its place.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider import __version__
from outrider.backends.heads import Head as Graphs
from outrider.backends.heads import check_head
from outrider.backends.taps import after_layers, hidden_states_of, multiplied_by, output_matrix_of, read_ir
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import (
    MANIFEST_NAME,
    MODEL_NAMES,
    PROPOSED_NAME,
    RESERVED_NAMES,
    DrafterEntry,
    Geometry,
    ModelEntry,
    Source,
    write_manifest,
)
from outrider.errors import BundleError, ExportError, OptionError, nearest, one_line
from outrider_export.diet import choose_tokens
from outrider_export.heads import container
from outrider_export.heads.formats import Head, read_head
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
_GROUPS = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
_OF_MAIN = "lm_head.weight"  # the main model's output matrix, if it was cut


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
    check_extra("Adding a drafter", "openvino")
    old = read_bundle(bundle)
    main = old.manifest.main
    if main.format != "openvino":
        raise ExportError(f"{old.folder} has its main model in {main.format}, and a drafter needs it in openvino.")
    source = fetch(locate(drafter, revision), False, progress)
    if source.path is None or not source.path.is_dir():
        raise ExportError(f"{drafter} is not a checkpoint folder. Name the one with the drafter's config.json.")
    head = read_head(source.path, main.geometry)
    name = head.kind if name is None else name
    _check_name(name, old)
    tokens = None
    if not head.uses_main_matrix and (draft_vocab is not None or draft_vocab_corpus is not None):
        raise OptionError(
            f"draft_vocab is for drafters with the main model's output matrix, and this {head.kind} drafter has its "
            "own. Leave it out."
        )
    if head.uses_main_matrix:
        vocabulary = Vocabulary.of_folder(old.tokenizer_path)
        tokens = choose_tokens(vocabulary, old.manifest, draft_vocab, draft_vocab_corpus, old.tokenizer_path, progress)
    try:
        with Target(old.folder, overwrite=True) as target:
            progress.phase("convert")
            for path in old.folder.rglob("*"):
                if path != old.folder / MANIFEST_NAME:  # what is written anew may be no link
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


def _check_name(name: str, bundle: Bundle) -> None:
    """Raise OptionError unless a drafter of the bundle can be called `name`, and its folder, too."""
    taken = [each.name for each in bundle.manifest.drafters]
    if name in taken:
        raise OptionError(f"The bundle has a drafter {name!r} already ({', '.join(taken)}). Choose another name.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise OptionError(f"name={name!r} is no name: it has to be letters, digits, '.', '_' and '-'. Choose another.")
    if name in RESERVED_NAMES or (bundle.folder / name).exists():
        raise OptionError(f"name={name!r} has another meaning, or is a folder of the bundle. Choose another name.")


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
    model = read_ir(ov.Core(), path)
    found = hidden_states_of(model, main.geometry.num_layers)
    if missing := [each for each in head.features if each not in found]:
        has = f"{after_layers(0)} to {after_layers(main.geometry.num_layers)}" if found else "none that are known"
        raise ExportError(f"The drafter reads hidden states {missing[0]!r}, and the main model's graph has {has}.")
    shared: dict[str, ov.Output] = {}
    tensors = head.tensors | {key: np.array([value], dtype=np.float32) for key, value in head.numbers.items()}
    proposed = tokens if head.uses_main_matrix else head.proposed
    if tokens is not None:
        cut_output(model, tokens)
        matrix = output_matrix_of(model)
        if matrix is None:
            raise AssertionError("`cut_output` has found it")
        if multiplied_by(matrix) == matrix.input_value(0):
            shared[_OF_MAIN] = matrix.input_value(1)
        else:
            tensors[_OF_MAIN] = _without_sums(matrix, head.hidden_size)
    target = folder / name / MODEL_NAMES["openvino"][0]
    container.write(target, tensors, shared, weights)
    if proposed is not None:
        np.save(folder / name / PROPOSED_NAME, proposed)
    entry = DrafterEntry(
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
                logits_width=_num_logits(main, head, proposed),
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
    try:
        check_head(target, Graphs.of(entry, path))
    except (BundleError, RuntimeError) as error:
        raise ExportError(f"{source.id} does not fit as a drafter of kind {head.kind}: {one_line(error)}") from error
    return entry


def _num_logits(main: ModelEntry, head: Head, proposed: NDArray[np.int32] | None) -> int:
    """The number of a drafter's logits.

    Raises:
        ExportError: when they are not for tokens of the main model.
    """
    if proposed is not None:
        if proposed.min() < 0 or proposed.max() >= main.vocab_size:
            raise ExportError(
                f"The drafter proposes tokens from {proposed.min():,} to {proposed.max():,}, and the main model has "
                f"{main.vocab_size:,}. Name the main model that it was trained for."
            )
        return len(proposed)
    own = [len(values) for name, values in head.tensors.items() if name.endswith("lm_head.weight")]
    width = min(own, default=main.geometry.logits_width)
    if width < main.vocab_size:
        raise ExportError(
            f"The drafter has logits for {width:,} tokens, and the main model has {main.vocab_size:,} tokens. Name the "
            "main model that it was trained for."
        )
    return width


def _without_sums(matrix: ov.Node, hidden_size: int) -> NDArray[np.float32]:
    """An output matrix, float32 [tokens, hidden], that has further columns in the graph: what it makes of ones."""
    rows = ops.parameter([-1, 1, hidden_size], np.float32)
    multiplied_by(matrix).replace(rows.output(0))
    part = ov.Model([ops.result(matrix)], [rows])
    compiled = ov.Core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32", _GROUPS: "0"})
    ones = np.eye(hidden_size, dtype=np.float32)[:, None]
    return np.ascontiguousarray(compiled([ones])[0][:, 0].T)


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
