"""Mask tokens in a main model: trained embeddings that make it predict several tokens ahead.

    add_masks(core, model, Masks(path, range(49_152, 49_156)))    # the graph reads four more token ids

Source: Monea et al. 2023, "PaSS: parallel speculative sampling"; Chen et al. 2024, "Hardware-aware parallel prompt
decoding for memory-efficient acceleration of LLM inference".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.taps import after_layers, hidden_states_of, ints, num_paged_layers, read_ir

EMBEDDINGS = "embeddings"  # the output of the file


@dataclass(frozen=True, slots=True)
class Masks:
    """A main model's mask tokens.

    path: an IR whose output `EMBEDDINGS` is float32 [masks, hidden]. token_ids: which stand for them, in their order,
    from the end of the vocabulary on.
    """

    path: Path
    token_ids: range


def add_masks(core: ov.Core, model: ov.Model, masks: Masks) -> None:
    """Let a graph with a paged cache read mask tokens. No bit changes for other tokens. Before `tap`.

    Raises:
        BundleError: when the embeddings do not fit, or the graph's form is unknown.
    """
    embedded = hidden_states_of(model, num_paged_layers(model)).get(after_layers(0))
    if embedded is None:
        raise BundleError(
            "Mask tokens need the place of the embedding in the main model's graph, which is not found there. "
            "Load it with drafter='suffix', or without one."
        )
    found = read_ir(core, masks.path).output(EMBEDDINGS).get_node().input_value(0)
    expected = [len(masks.token_ids), embedded.get_partial_shape()[2].get_length()]
    if list(found.get_shape()) != expected:
        raise BundleError(
            f"{masks.path} has embeddings {list(found.get_shape())}, and this main model's mask tokens are {expected}. "
            "Add the drafter again."
        )
    token_ids, first = model.input("input_ids"), ops.constant(np.int64(masks.token_ids.start))
    readers, users = token_ids.get_target_inputs(), embedded.get_target_inputs()
    known = ops.minimum(token_ids, ops.subtract(first, ops.constant(np.int64(1))))
    for reader in readers:  # a mask's id is none of the embedding's rows
        reader.replace_source_output(known.output(0))
    place = ops.clamp(ops.subtract(token_ids, first), 0, len(masks.token_ids) - 1)
    rows = ops.unsqueeze(ops.gather(found, place, ops.constant(np.int64(0))), ints(1))
    is_mask = ops.unsqueeze(ops.greater_equal(token_ids, first), ints(1, 2))
    chosen = ops.select(is_mask, ops.convert(rows, embedded.get_element_type()), embedded)
    for user in users:
        user.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()
