"""Embeddings that a main model reads instead of its tokens', such as those of an image.

    add_embeds(model)                                   # the graph has two more inputs, or three
    given_embeds(call.chains, num_rows, width)          # what they are in one call
    given_grid(call.chains, num_rows)
    given_whole(call.chains, num_rows)

Source: the inputs_embeds of vision-language models in Transformers. Positions in rows and columns: Wang et al. 2024,
"Qwen2-VL", M-RoPE. Embeddings that later layers add: Meng et al. 2024, "DeepStack".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.bundle.vision import BothWays
from outrider.errors import BundleError
from outrider.models.backends.attention import windows_of
from outrider.models.backends.nodes import floats, integer, ints, parameter
from outrider.models.backends.taps import PAGED, after_layers, hidden_states_of, num_paged_layers
from outrider.types import Span

EMBEDS = "given_embeds"  # float32 [m, parts · hidden], m ≥ 1
EMBED_ROWS = "given_rows"  # int64 [n]: for each row of the call the row of `EMBEDS` that it reads, −1 for its token's
AXES = "position_axes"  # the node, int64 [n, 3, 1], of the positions by which rows are rotated, of all three axes
WHOLE = "given_whole"  # int32 [n]: 1 for rows that attend to those around them with a 1 in both directions
GRID = "given_grid"  # int64 [n, 3]: what is added to a row's position along each axis


_TYPES = 25  # the input of PAGED that is `WHOLE` (openvino/op/paged_attention.hpp, 2026.4: token_type_ids)


def add_embeds(
    model: ov.Model, num_parts: int = 1, both_ways: BothWays = "none", place_token_id: int | None = None
) -> None:
    """Let a graph with a paged cache read given embeddings. No bit changes where tokens are read. Before `tap`.

    num_parts: the first is read in place of a token's embedding, and each other is added after one layer more.
    both_ways: the layers in which spans attend in both directions. place_token_id: of the token that layers with
    embeddings of their own look up there.

    Raises:
        BundleError: when the graph's form is unknown.
    """
    states = hidden_states_of(model, num_paged_layers(model))
    read = [states[name] for i in range(num_parts) if (name := after_layers(i)) in states]  # [n, 1, hidden]
    if len(read) < num_parts:
        raise BundleError(
            "Images are read in place of the embedding in the main model's graph, which is not found there. Export it "
            "again."
        )
    embedded = read[0]
    users = embedded.get_target_inputs()
    width = embedded.get_partial_shape()[2].get_length()
    given = parameter(EMBEDS, ov.Type.f32, (-1, num_parts * width))
    rows = parameter(EMBED_ROWS, ov.Type.i64, (-1,))
    zero = integer(0)
    model.add_parameters([given, rows])
    has_embeds = ops.greater_equal(rows, zero)
    if place_token_id is not None:
        _replace_tokens(model, has_embeds, place_token_id)
    is_given = ops.unsqueeze(has_embeds, ints(1, 2))
    chosen = ops.unsqueeze(ops.gather(given, ops.maximum(rows, zero), zero), ints(1))
    parts = [chosen] if num_parts == 1 else ops.split(chosen, integer(2), num_parts).outputs()
    for state, part in zip(read[1:], parts[1:], strict=True):
        node = state.get_node()
        # What the layer adds to the stream; the stream itself is read by a norm, too.
        added = next(each for each in node.inputs() if len(each.get_source_output().get_target_inputs()) == 1)
        part = ops.select(is_given, part, floats(np.zeros((1, 1, 1))))
        source = added.get_source_output()
        added.replace_source_output(ops.add(source, ops.convert(part, source.get_element_type())).output(0))
    first = ops.select(is_given, ops.convert(parts[0], embedded.get_element_type()), embedded)
    for user in users:
        user.replace_source_output(first.output(0))
    _add_grid(model)
    _add_whole(model, both_ways)
    model.validate_nodes_and_infer_types()


def _add_grid(model: ov.Model) -> None:
    """Let rows have another position along each axis, if the model rotates by them."""
    axes = next((node for node in model.get_ops() if node.get_friendly_name() == AXES), None)
    if axes is None:
        return
    grid = parameter(GRID, ov.Type.i64, (-1, 3))
    readers = axes.output(0).get_target_inputs()
    moved = ops.add(axes, ops.unsqueeze(grid, ints(2)))
    for reader in readers:
        reader.replace_source_output(moved.output(0))
    model.add_parameters([grid])


def _replace_tokens(model: ov.Model, has_embeds: ov.Node, token_id: int) -> None:
    """Let rows with embeddings have this token."""
    tokens = model.input("input_ids")
    readers = tokens.get_target_inputs()
    shown = ops.select(has_embeds, ops.constant(np.full((1,), token_id, np.int64)), tokens.get_node())
    for reader in readers:
        reader.replace_source_output(shown.output(0))


def _add_whole(model: ov.Model, both_ways: BothWays) -> None:
    """Let rows of a span attend to all of it, in layers that do so.

    On CPU that holds in any call that has all of the span; the GPU plugin (2026.4) ignores it after earlier tokens.
    """
    layers = [node for node in model.get_ordered_ops() if node.get_type_name() == PAGED] if both_ways != "none" else []
    if not layers:
        return
    whole = parameter(WHOLE, ov.Type.i32, (-1,))
    for node, window in zip(layers, windows_of(model), strict=True):
        if both_ways == "all" or window:
            node.input(_TYPES).replace_source_output(whole.output(0))
    model.add_parameters([whole])


def given_whole(chains: Iterable[tuple[Any, int, int, int]], num_rows: int) -> NDArray[np.int32]:
    """The input `WHOLE` of a call. chains: as of `given_embeds`."""
    made = np.zeros(num_rows, dtype=np.int32)
    for slot, row, length, position in chains:
        for span in slot.embeds:
            begin, end = max(position, span.begin), min(position + length, span.end)
            if span.whole and begin < end:
                made[row + begin - position : row + end - position] = 1
    return made


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


def given_grid(chains: Iterable[tuple[Any, int, int, int]], num_rows: int) -> NDArray[np.int64]:
    """The input `GRID` of a call. chains: as of `given_embeds`."""
    made = np.zeros((num_rows, 3), dtype=np.int64)
    for slot, row, length, begin in chains:
        if any(span.grid for span in slot.embeds):
            made[row : row + length] = grid_offsets(slot.embeds, begin, length)
    return made


def grid_offsets(embeds: Sequence[Span], begin: int, length: int) -> NDArray[np.int64]:
    """What is added to the positions from `begin` on, int64 [length, 3].

    All tokens of an image have the first one's position, plus their row along the second axis, and their column along
    the third. The text after it goes on where the longer of its edges ends.
    """
    places = np.arange(begin, begin + length)
    made = np.zeros((length, 3), dtype=np.int64)
    for span in embeds:
        if span.grid is None:
            continue
        count, columns = len(span.embeds), span.grid[1]
        made[places >= span.begin + count] -= count - max(span.grid)
        within = (places >= span.begin) & (places < span.begin + count)
        place = places[within] - span.begin
        made[within] += np.stack([0 * place, place // columns, place % columns], axis=1) - place[:, None]
    return made
