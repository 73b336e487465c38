"""Embeddings that a main model reads instead of its tokens', such as those of an image.

    add_embeds(model)                                   # the graph has two more inputs
    given_embeds(call.chains, num_rows, width)          # what they are in one call

Source: the inputs_embeds of vision-language models in Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.taps import after_layers, hidden_states_of, ints, num_paged_layers, parameter

EMBEDS = "given_embeds"  # float32 [m, hidden], m ≥ 1
EMBED_ROWS = "given_rows"  # int64 [n]: for each row of the call the row of `EMBEDS` that it reads, −1 for its token's


def add_embeds(model: ov.Model) -> None:
    """Let a graph with a paged cache read given embeddings. No bit changes where tokens are read. Before `tap`.

    Raises:
        BundleError: when the graph's form is unknown.
    """
    embedded = hidden_states_of(model, num_paged_layers(model)).get(after_layers(0))  # [n, 1, hidden]
    if embedded is None:
        raise BundleError(
            "Images are read in place of the embedding in the main model's graph, which is not found there. Export it "
            "again."
        )
    users = embedded.get_target_inputs()
    given = parameter(EMBEDS, ov.Type.f32, (-1, embedded.get_partial_shape()[2].get_length()))
    rows = parameter(EMBED_ROWS, ov.Type.i64, (-1,))
    zero = ops.constant(np.int64(0))
    model.add_parameters([given, rows])
    chosen = ops.unsqueeze(ops.gather(given, ops.maximum(rows, zero), zero), ints(1))
    chosen = ops.convert(chosen, embedded.get_element_type())
    read = ops.select(ops.unsqueeze(ops.greater_equal(rows, zero), ints(1, 2)), chosen, embedded)
    for user in users:
        user.replace_source_output(read.output(0))
    model.validate_nodes_and_infer_types()


def given_embeds(
    chains: Iterable[tuple[Any, int, int, int]], num_rows: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The inputs `EMBEDS` and `EMBED_ROWS` of a call with `num_rows` rows.

    chains: a slot, its first row in the call, how many rows it has from there on, and the first one's position.
    """
    rows = np.full(num_rows, -1, dtype=np.int64)
    given: list[NDArray[np.float32]] = []
    count = 0
    for slot, row, length, position in chains:
        for span in slot.embeds:
            begin = max(position, span.begin)
            end = min(position + length, span.begin + len(span.embeds))
            if begin < end:
                rows[row + begin - position : row + end - position] = np.arange(count, count + end - begin)
                given.append(span.embeds[begin - span.begin : end - span.begin])
                count += end - begin
    return np.concatenate(given) if given else np.zeros((1, width), dtype=np.float32), rows
