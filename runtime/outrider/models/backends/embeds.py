"""What a main model reads instead of its tokens' embeddings: mask tokens, and embeddings that are given to it.

    add_masks(core, model, Masks(path, range(49_152, 49_156)))    # the graph reads four more token ids
    add_embeds(model)                                   # the graph has two more inputs
    given_embeds(call.chains, num_rows, width)          # what they are in one call

Mask tokens are trained embeddings that make the model predict several tokens ahead. Given embeddings are such as those
of an image.

Source: Monea et al. 2023, "PaSS: parallel speculative sampling"; Chen et al. 2024, "Hardware-aware parallel prompt
decoding for memory-efficient acceleration of LLM inference". The inputs_embeds of vision-language models in
Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.taps import after_layers, hidden_states_of, ints, num_paged_layers, parameter, read_ir

EMBEDDINGS = "embeddings"  # the output of a file of mask tokens
EMBEDS = "given_embeds"  # float32 [m, hidden], m ≥ 1
EMBED_ROWS = "given_rows"  # int64 [n]: for each row of the call the row of `EMBEDS` that it reads, −1 for its token's


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
    embedded = _embedding_of(model, "Mask tokens are", "Load it with drafter='suffix', or without one.")
    found = read_ir(core, masks.path).output(EMBEDDINGS).get_node().input_value(0)
    expected = [len(masks.token_ids), embedded.get_partial_shape()[2].get_length()]
    if list(found.get_shape()) != expected:
        raise BundleError(
            f"{masks.path} has embeddings {list(found.get_shape())}, and this main model's mask tokens are {expected}. "
            "Add the drafter again."
        )
    token_ids, first = model.input("input_ids"), ops.constant(np.int64(masks.token_ids.start))
    readers = token_ids.get_target_inputs()
    known = ops.minimum(token_ids, ops.subtract(first, ops.constant(np.int64(1))))
    for reader in readers:  # a mask's id is none of the embedding's rows
        reader.replace_source_output(known.output(0))
    place = ops.clamp(ops.subtract(token_ids, first), 0, len(masks.token_ids) - 1)
    _read_instead(model, embedded, found, place, ops.greater_equal(token_ids, first))


def add_embeds(model: ov.Model) -> None:
    """Let a graph with a paged cache read given embeddings. No bit changes where tokens are read. Before `tap`.

    Raises:
        BundleError: when the graph's form is unknown.
    """
    embedded = _embedding_of(model, "Images are", "Export it again.")
    given = parameter(EMBEDS, ov.Type.f32, (-1, embedded.get_partial_shape()[2].get_length()))
    rows = parameter(EMBED_ROWS, ov.Type.i64, (-1,))
    zero = ops.constant(np.int64(0))
    model.add_parameters([given, rows])
    _read_instead(model, embedded, given, ops.maximum(rows, zero), ops.greater_equal(rows, zero))


def _embedding_of(model: ov.Model, what: str, remedy: str) -> ov.Output:
    """The embeddings of the tokens in a graph with a paged cache, [n, 1, hidden]."""
    embedded = hidden_states_of(model, num_paged_layers(model)).get(after_layers(0))
    if embedded is None:
        raise BundleError(
            f"{what} read in place of the embedding in the main model's graph, which is not found there. {remedy}"
        )
    return embedded


def _read_instead(model: ov.Model, embedded: ov.Output, table: ov.Node, places: ov.Node, is_other: ov.Node) -> None:
    """Have the graph read the rows `places`, int64 [n], of a table [m, hidden], where `is_other`, bool [n]."""
    users = embedded.get_target_inputs()
    rows = ops.unsqueeze(ops.gather(table, places, ops.constant(np.int64(0))), ints(1))
    rows = ops.convert(rows, embedded.get_element_type())
    chosen = ops.select(ops.unsqueeze(is_other, ints(1, 2)), rows, embedded)
    for user in users:
        user.replace_source_output(chosen.output(0))
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
