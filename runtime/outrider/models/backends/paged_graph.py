"""Rewrites of a model's graph before it is compiled.

All work in place on the stateful IR that optimum-intel and openvino-genai write.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from outrider.bundle.vision import BothWays
from outrider.errors import BundleError, one_line
from outrider.models.backends.adapters import Adapters, add_adapters
from outrider.models.backends.attention import check_kinds, check_paged, check_recognised, check_windows, wrongly_stored
from outrider.models.backends.embeds import add_embeds
from outrider.models.backends.features import check_features
from outrider.models.backends.nodes import integer, ints, parameter
from outrider.models.backends.taps import add_outputs, hidden_states_of, num_paged_layers, output_matrix_of, read_ir

ROWS = "rows"  # the input that `gather_rows` adds
HIDDEN_IN = "hidden_states"  # the input of a drafter that reads hidden states
STATE_BEGINS = "la.subsequence_begins"  # the input that `split_begins` adds
_RANK_OF_COUNT = 3
# The input of each operator of states that has the sequences' beginnings (openvino/op/paged_causal_conv1d.hpp and the
# like, 2026.4).
_BEGINS_OF = {"PagedCausalConv1D": 4, "PagedGatedDeltaNet": 6, "PagedSelectiveSSM": 6}


def read_decoder(
    core: ov.Core,
    path: Path | ov.Model,
    features: Sequence[str] = (),
    adapters: Adapters | None = None,
    attended: int = 0,
    windows: Sequence[int] | None = None,
    embeds: int = 0,
    both_ways: BothWays = "none",
    place_token_id: int | None = None,
    kinds: Sequence[str] | None = None,
) -> ov.Model:
    """Read a stateful decoder, replace the cache inside it, and make outputs of these hidden states.

    path: of the model's file, or the model, which is changed in place. adapters: that it is to apply; attended:
    see `add_adapters`. windows: the sliding window of each layer, which are checked; None: not known. embeds: in how
    many parts it is to read given embeddings; 0: not at all. both_ways, place_token_id: see `add_embeds`. kinds: of the
    layers' states, which are checked, see `check_kinds`; None: not known.

    Raises:
        BundleError: when it cannot be read, is none, has other windows or states, or has no such hidden states.
    """
    model = path if isinstance(path, ov.Model) else read_ir(core, path)
    to_paged_attention(model)
    if kinds is not None:
        check_kinds(model, kinds)
    if windows is not None:
        check_windows(model, windows)
    if embeds:
        add_embeds(model, embeds, both_ways, place_token_id)
    tap(model, features)
    gather_rows(model)
    if adapters is not None:
        add_adapters(core, model, adapters, attended=attended)
    return model


def tap(model: ov.Model, names: Sequence[str]) -> None:
    """Make outputs of hidden states, by their names. Before `gather_rows`.

    Raises:
        BundleError: when the graph's form is unknown.
    """
    if not names:
        return
    found = hidden_states_of(model, num_paged_layers(model))
    check_features(names, found)
    add_outputs(model, found, names)


def to_paged_attention(model: ov.Model) -> None:
    """Replace the cache inside the model with blocks that the caller owns.

    Inputs become input_ids [n], position_ids [n] (int64), past_lens [s], subsequence_begins [s+1],
    block_indices_begins [s+1], block_indices [b], max_context_len [] (int32), and key_cache.i, value_cache.i for each
    layer, for n tokens of s sequences end to end (Kwon et al. 2023; OpenVINO's SDPAToPagedAttention). States become
    tables [rows, …] that the caller owns, too, with inputs of the same kind that begin with "la."; see `PagedCall`.

    Raises:
        BundleError: when the graph is not a stateful decoder, or keeps a state that is not paged, or stored otherwise.
    """
    connect_positions(model)
    wrong = wrongly_stored(model)
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        check_recognised(model)
        raise BundleError(
            f"The model cannot be given a paged cache: {one_line(error)}. Export it again with 'outrider export'."
        ) from error
    check_paged(model)
    if wrong:
        raise BundleError(
            f"The model stores {wrong}. With a paged cache OpenVINO stores a convolution's last columns, or what a "
            "recurrence has after the last token, so its text would be another one. Export its checkpoint with "
            "'outrider export'."
        )
    split_begins(model)


def connect_positions(model: ov.Model) -> None:
    """Let rotary embeddings read `position_ids` where the graph counts positions from the cache's length instead.

    optimum-intel's export of Qwen3.5 (2.2) does: a Range, as [1, 1, n], is broadcast to [3, batch, n]. With a paged
    cache, only calls of one row would be right.
    """
    positions = next((node for node in model.get_parameters() if "position_ids" in node.output(0).get_names()), None)
    if positions is None or positions.output(0).get_target_inputs():
        return
    for node in model.get_ops():
        if node.get_type_name() == "Broadcast" and _is_count(node.input_value(0).get_node()):
            node.input(0).replace_source_output(ops.unsqueeze(positions, ints(0)).output(0))
    model.validate_nodes_and_infer_types()


def _is_count(node: ov.Node) -> bool:
    """Whether a node makes [1, 1, n] of a Range."""
    if node.get_type_name() != "Reshape" or node.get_output_partial_shape(0).rank != _RANK_OF_COUNT:
        return False
    return bool(node.input_value(0).get_node().get_type_name() == "Range")


def split_begins(model: ov.Model) -> None:
    """Let the operators of states see other sequences than the attention: an input `la.subsequence_begins` [s+1].

    Where a rule separates rows, each row of an answer is a sequence of its own to the attention, and a state goes
    through all of them.
    """
    found = [(node, _BEGINS_OF[node.get_type_name()]) for node in model.get_ops() if node.get_type_name() in _BEGINS_OF]
    if found:
        begins = parameter(STATE_BEGINS, ov.Type.i32, (-1,))
        for node, i in found:
            node.input(i).replace_source_output(begins.output(0))
        model.add_parameters([begins])
        model.validate_nodes_and_infer_types()


def needs_all_rows(model: ov.Model) -> bool:
    """Whether the operators of states have to go through each row of a call on the CPU, also dummy rows at its end.

    `PagedSelectiveSSM` refuses fewer. The others give what was in memory there, which may be no number: a choice of
    experts must not read it.
    """
    return any(node.get_type_name() in ("PagedSelectiveSSM", "TopK") for node in model.get_ops())


def gather_rows(model: ov.Model) -> None:
    """Compute logits for chosen rows only.

    Puts a Gather with a new input `rows` (int64 [r]) before the product with the output matrix. Logits [n, 1, width]
    become [r, 1, width]. All rows of a prompt of 4,000 tokens would be 2.4 GB at 152,000 columns.

    Raises:
        BundleError: when the output is not made by a matrix product.
    """
    node = output_matrix_of(model)
    if node is None:
        raise BundleError("The model's output 'logits' is not made by a MatMul. Export it again.")
    rows = parameter(ROWS, ov.Type.i64, (-1,))
    chosen = ops.gather(node.input_value(0), rows, integer(0))
    node.input(0).replace_source_output(chosen.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def input_width(compiled: Any, name: str) -> int:
    """The width of a compiled graph's input of rows; 0 if it has none of this name."""
    ports = [port for port in compiled.inputs if name in port.get_names()]
    return int(ports[0].partial_shape[1].get_length()) if ports else 0
