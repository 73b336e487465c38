"""What a decoder's layers attend to: checks that all states of its graph are paged, and its sliding windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outrider.bundle.architectures import STATES
from outrider.errors import BundleError
from outrider.models.backends.taps import PAGED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import openvino as ov

_WINDOW = 10  # the input of PAGED with the sliding window, 0 for none (openvino/op/paged_attention.hpp, 2026.4)
_UNKNOWN = -1
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
