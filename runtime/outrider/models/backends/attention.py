"""What a decoder's layers keep and attend to: checks that all states are paged as they are stored, and its windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import openvino as ov

from outrider.bundle.architectures import STATES
from outrider.bundle.manifest import describe_layers
from outrider.errors import BundleError
from outrider.models.backends.taps import PAGED

_WINDOW = 10  # the input of PAGED with the sliding window, 0 for none (openvino/op/paged_attention.hpp, 2026.4)
_UNKNOWN = -1
_END = 2**31 - 1  # slices that end there, or beyond, end with the last column
# Operators with a paged cache, by the layer that they are of. The last two have a convolution before them.
_KINDS = {
    PAGED: "",
    "PagedCausalConv1D": "short_convolution",
    "PagedGatedDeltaNet": "gated_delta_net",
    "PagedSelectiveSSM": "selective_ssm",
}
SLIDING = (
    "sliding windows of {windows}, for which ONNX Runtime needs a cache as long as the window, and its rows depend on "
    "the number of rows. Export the model's checkpoint for OpenVINO: outrider export MODEL."
)
_ANOTHER = "Choose a model of docs/models.md."


def check_trimmable(model: ov.Model) -> None:
    """Check that a stateful decoder keeps keys and values alone, of which the newest can be dropped.

    These are [batch, heads, tokens, head size], with any number of tokens. Other layers' states have a fixed size.

    Raises:
        BundleError: with the first other state.
    """
    for node in _states(model):
        if not _has_tokens(node):
            raise BundleError(f"The model keeps a state {_named(node)} besides keys and values: {STATES}. {_ANOTHER}")


def check_paged(model: ov.Model) -> None:
    """Check that a decoder with a paged cache keeps nothing elsewhere.

    OpenVINO finds states by the form of the graph around them, and leaves others in the graph without a word.

    Raises:
        BundleError: with the first state that is left.
    """
    for node in _states(model):
        raise _not_paged(node)


def check_recognised(model: ov.Model) -> None:
    """Check that a decoder which OpenVINO gave no paged cache keeps no state besides keys and values.

    Raises:
        BundleError: with the first such state that is left.
    """
    for node in _states(model):
        if not _has_tokens(node):
            raise _not_paged(node)


def wrongly_stored(model: ov.Model) -> str:
    """Which state of a stateful decoder is stored otherwise than by OpenVINO's paged operators; "" if none is.

    OpenVINO finds a state by what reads it, and drops what is stored in it without a look.
    """
    stored = {sink.get_variable_id(): sink.input_value(0) for sink in model.get_sinks()}
    for node in _states(model):
        value = stored.get(node.get_variable_id())
        if not _has_tokens(node) and (value is None or not _goes_on(node, value)):
            what = "nothing" if value is None else f"what {value.get_node().get_type_name()} makes"
            return f"{what} in its state {_named(node)}"
    return ""


def _goes_on(state: ov.Node, value: ov.Output) -> bool:
    """Whether a value is what the operator that reads a state leaves after the last token."""
    value = _unmoved(value)
    node: Any = value.get_node()
    if node.get_type_name() == "Slice":
        joined = node.input_value(0).get_node()
        if joined.get_type_name() != "Concat":
            return False
        first, *_, last = [_unmoved(each) for each in joined.input_values()]
        if _is_read(state, first):  # a convolution's columns and the tokens after them
            begin, end, step, _ = (_number(each) for each in node.input_values()[1:])
            return (begin, step) == (-state.get_output_partial_shape(0)[2].get_length(), 1) and end >= _END
        node, value = last.get_node(), last  # optimum-intel joins all that a Loop gives
    if node.get_type_name() != "Loop":
        return False
    given = {each.output_index: each.body_value_index for each in node.get_output_descriptions()}
    carried = [each for each in node.get_input_descriptions() if hasattr(each, "body_value_index")]
    return given[value.get_index()] in [
        each.body_value_index for each in carried if _is_read(state, node.input_value(each.input_index))
    ]


def _unmoved(value: ov.Output) -> ov.Output:
    """What a value is another shape of."""
    while value.get_node().get_type_name() in ("Reshape", "Squeeze", "Unsqueeze"):
        value = value.get_node().input_value(0)
    return value


def _is_read(state: ov.Node, value: ov.Output) -> bool:
    """Whether a value is a state as it was read, of each sequence's own."""
    node = value.get_node()
    if node.get_type_name() == "Gather":
        node = node.input_value(0).get_node()
    return bool(node.get_name() == state.get_name())


def check_kinds(model: ov.Model, expected: Sequence[str]) -> None:
    """Check what each layer of a decoder with a paged cache keeps, as `Geometry.layer_states` has it.

    Raises:
        BundleError: with both, if any layer keeps a state.
    """
    found: list[str] = []
    for node in model.get_ordered_ops():
        kind = _KINDS.get(node.get_type_name())
        if kind in ("gated_delta_net", "selective_ssm") and found[-1:] == ["short_convolution"]:
            found[-1] = kind
        elif kind is not None:
            found.append(kind)
    if (any(found) or any(expected)) and found != [*expected]:
        raise BundleError(
            f"The manifest says that the model's layers keep {_describe_kinds(expected)}, and its graph has "
            f"{_describe_kinds(found)}. Precision and memory are chosen by them. Export the bundle again with "
            "'outrider export'."
        )


def _describe_kinds(kinds: Sequence[str]) -> str:
    """Kinds of states in words, such as "gated_delta_net (layers 0-2, 4-6)"."""
    layers = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in kinds if kind}
    return " and ".join(f"{kind} (layers {describe_layers(each)})" for kind, each in layers.items()) or "no states"


def _not_paged(node: ov.Node) -> BundleError:
    return BundleError(
        f"The model keeps a state {_named(node)} besides keys and values, in a form that OpenVINO does not page: "
        f"{STATES}. {_ANOTHER}"
    )


def _has_tokens(node: ov.Node) -> bool:
    """Whether a state is as large as there are tokens, as keys and values are."""
    shape = node.get_output_partial_shape(0)
    return bool(shape.rank.is_static and shape.rank.get_length() == 4 and shape[2].is_dynamic)


def _states(model: ov.Model) -> list[ov.Node]:
    return [node for node in model.get_ops() if node.get_type_name() == "ReadValue"]


def _named(node: ov.Node) -> str:
    return f"{node.get_output_partial_shape(0)} ({node.get_variable_id()[:60]})"


def windows_of(model: ov.Model) -> tuple[int, ...]:
    """The sliding window of each layer of a decoder with a paged cache, in tokens; 0 for none, −1 if not known."""
    found = [node for node in model.get_ordered_ops() if node.get_type_name() == PAGED]
    return tuple(_number(node.input_value(_WINDOW)) for node in found)


def check_windows(model: ov.Model, expected: Sequence[int]) -> None:
    """Check the sliding windows of a decoder with a paged cache, by layer.

    OpenVINO finds them by the form of the attention's masks. It drops a mask of another form without a word, and the
    layer would attend to all tokens.

    Raises:
        BundleError: with both.
    """
    found = windows_of(model)
    if found != tuple(expected):
        raise BundleError(
            f"The model's layers have sliding windows of {describe_windows(expected)}, and its graph with a paged "
            f"cache has {describe_windows(found)}: OpenVINO does not know the form of its masks, and its text would be "
            "another one. Export the bundle again with 'outrider export', or choose a model of docs/models.md."
        )


def describe_windows(windows: Sequence[int]) -> str:
    """Windows in words, such as "16 tokens (4 of 6 layers)"."""
    limited = [window for window in windows if window]
    if not limited:
        return "no limit"
    sizes = " and ".join("unknown" if n == _UNKNOWN else f"{n:,}" for n in sorted(set(limited)))
    return f"{sizes} tokens ({len(limited)} of {len(windows)} layers)"


def _number(value: ov.Output) -> int:
    """The integer that a value is made of: a constant, or a product of such."""
    node = value.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        data = node.get_data()
        return int(data.reshape(-1)[0]) if data.size == 1 else _UNKNOWN
    if kind in ("Convert", "Squeeze", "Unsqueeze", "Reshape"):
        return _number(node.input_value(0))
    if kind == "Multiply":
        return math.prod(map(_number, node.input_values()))
    return _UNKNOWN
