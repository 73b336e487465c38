"""Writes a drafter that reads hidden states into a bundle's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from outrider.backends.taps import hidden_states_of, output_matrix_of, read_ir
from outrider.bundle.manifest import MODEL_NAMES, PROPOSED_NAME, DrafterEntry, Geometry, ModelEntry, Source
from outrider.errors import OptionError, nearest
from outrider_export.heads import container, onnx_main
from outrider_export.heads.formats import MATRIX, check_features
from outrider_export.output_matrix import cut_output

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider_export.heads.formats import Head
    from outrider_export.sources import Located

WEIGHTS = ("int8", "fp16", "fp32")


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
