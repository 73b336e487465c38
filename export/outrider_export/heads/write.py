"""Writes a drafter that reads hidden states into a bundle's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.bundle.kinds import KINDS
from outrider.bundle.manifest import (
    MODEL_NAMES,
    PROPOSED_NAME,
    DrafterEntry,
    Geometry,
    ModelEntry,
    Source,
)
from outrider.errors import BundleError, ExportError, OptionError, nearest, one_line
from outrider.models.backends.heads import Head as Graphs
from outrider.models.backends.heads import check_head
from outrider.models.backends.heads.layers import NUM_ACTIVE
from outrider.models.backends.taps import hidden_states_of, multiplied_by, output_matrix_of, read_ir
from outrider.system.core import new_core
from outrider_export.heads import assistant, container, dspark, onnx_main
from outrider_export.heads.formats import MATRIX, HeadCheckpoint
from outrider_export.sources.source import Located

WEIGHTS = ("int8", "fp16", "fp32")
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def check_head_weights(option: str, weights: str) -> None:
    """Check a weight format for a drafter that reads hidden states.

    Raises:
        OptionError: with the nearest known one.
    """
    if weights not in WEIGHTS:
        raise OptionError(f"{option}={weights!r} is not a weight format of such drafters. {nearest(weights, WEIGHTS)}")


def write_head(
    folder: Path,
    main: ModelEntry,
    head: HeadCheckpoint,
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
    kind = KINDS[head.kind]
    if kind.design == "reader" and main.format != "openvino":
        raise ExportError(
            f"{source.id} reads keys and values of a main model in OpenVINO's format, and this one is in {main.format}"
            ". Export the main model for OpenVINO: outrider export MODEL"
        )
    path = folder / main.folder / MODEL_NAMES[main.format][0]
    numbers = head.numbers | (assistant.caches_of(head, main.geometry) if kind.design == "reader" else {})
    tensors = head.tensors | {key: np.array([value], dtype=np.float32) for key, value in numbers.items()}
    tensors |= dspark.cut(tensors, main.vocab_size, tokens)
    share = onnx_main.share if main.format == "onnx" else _share
    tensors |= share(path, main.geometry, head, tokens)
    proposed = tokens if head.uses_main_matrix else head.proposed
    target = folder / name / MODEL_NAMES["openvino"][0]
    container.write(target, tensors, weights)
    if proposed is not None:
        np.save(folder / name / PROPOSED_NAME, proposed)
    entry = DrafterEntry(
        name=name,
        kind=head.kind,
        model=ModelEntry(
            folder=name,
            format="openvino",
            weights=weights,
            geometry=_geometry_of(main, head, proposed),
            vocab_size=main.vocab_size,
            vocab_sha256=main.vocab_sha256,
            source=Source(id=source.id, kind=source.kind, revision=source.revision, recipe={"route": "drafter"}),
        ),
        num_proposed_tokens=None if proposed is None else len(proposed),
        features=head.features,
        num_places=head.num_places,
        mask_token_id=head.mask_token_id,
    )
    check_drafter(folder, main, entry)
    return entry


def _geometry_of(main: ModelEntry, head: HeadCheckpoint, proposed: NDArray[np.int32] | None) -> Geometry:
    experts = [len(each) for name, each in head.tensors.items() if name.endswith(container.EXPERTS)]
    return Geometry(
        architecture=head.kind,
        num_layers=head.num_layers,
        num_heads=head.num_heads,
        num_kv_heads=head.num_kv_heads,
        head_size=head.head_size,
        hidden_size=head.hidden_size,
        context_length=head.context_length,
        logits_width=_num_logits(main, head, proposed),
        num_experts=max(experts, default=0),
        num_active_experts=int(head.numbers.get(NUM_ACTIVE, 0)),
    )


def check_drafter(folder: Path, main: ModelEntry, entry: DrafterEntry) -> None:
    """Make the graphs of a drafter in the bundle's folder `folder`.

    Raises:
        ExportError: when they do not fit together.
    """
    own, mains = (folder / each.folder / MODEL_NAMES[each.format][0] for each in (entry.model, main))
    try:
        check_head(own, Graphs.of(entry, mains))
    except (BundleError, RuntimeError) as error:
        source = entry.model.source.id
        raise ExportError(f"{source} does not fit as a drafter of kind {entry.kind}: {one_line(error)}") from error


def _share(
    path: Path, geometry: Geometry, head: HeadCheckpoint, tokens: NDArray[np.int32] | None
) -> dict[str, NDArray[np.float32]]:
    """Check that an IR has a drafter's hidden states, and return these rows of its output matrix.

    All else is read from the IR at load, the whole output matrix, too.
    """
    model = read_ir(new_core(), path)
    head.check_features(hidden_states_of(model, geometry.num_layers), geometry.num_layers)
    if tokens is None:
        return {}
    if (matrix := output_matrix_of(model)) is None:
        raise ExportError(f"{path} has logits that are not made by a MatMul: add the drafter with --draft-vocab all.")
    return {MATRIX: _rows_of(matrix, tokens, head.hidden_size)}


def _num_logits(main: ModelEntry, head: HeadCheckpoint, proposed: NDArray[np.int32] | None) -> int:
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


def _rows_of(matrix: ov.Node, tokens: NDArray[np.int32], hidden_size: int) -> NDArray[np.float32]:
    """Rows of an output matrix, float32 [tokens, hidden], without further columns: what they make of ones."""
    rows = ops.parameter([-1, 1, hidden_size], np.float32)
    axis = 0 if matrix.get_attributes()["transpose_b"] else 1
    cut = ops.gather(matrix.input_value(1), ops.constant(tokens), ops.constant(np.int32(axis)))
    matrix.input(1).replace_source_output(cut.output(0))
    multiplied_by(matrix).replace(rows.output(0))
    compiled = new_core().compile_model(ov.Model([ops.result(matrix)], [rows]), "CPU", _EXACT)
    ones = np.eye(hidden_size, dtype=np.float32)[:, None]
    return np.ascontiguousarray(compiled([ones])[0][:, 0].T)
