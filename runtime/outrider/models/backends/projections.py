"""The products of a decoder's layers by the names that Llama's checkpoints give their weights.

They are found by what the graph does with them: names of nodes differ with the program that wrote the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import openvino as ov

from outrider.errors import BundleError
from outrider.models.backends.taps import PAGED, after_layers, hidden_states_of, is_weight, multiplied_by

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = (*ATTENTION, *FEED_FORWARD)
_ATTENTIONS = ("ScaledDotProductAttention", PAGED)
_UNKNOWN = (
    "The main model's layers have another form than Llama's or Qwen's: a residual stream, an attention with separate "
    "products for queries, keys and values, and a gated feed-forward part. "
)


@dataclass(frozen=True, slots=True)
class Projection:
    """A product y = x · W of a layer. num_in, num_out: the lengths of x and y.

    node: multiplies x, perhaps for several products that read x: y is `output`, of the rows of its matrix from `begin`.
    """

    node: ov.Node
    num_in: int
    num_out: int
    output: ov.Output
    begin: int = 0

    @property
    def rows(self) -> ov.Output:
        """x, [n, 1, num_in]."""
        return multiplied_by(self.node)


def projections_of(
    model: ov.Model, num_layers: int, *, attended: int, layers: Sequence[int] | None = None
) -> list[dict[str, Projection]]:
    """The products of each layer, by `NAMES`, in a decoder with its own cache or a paged one.

    attended: numbers of all heads' outputs, side by side. layers: the numbers of those that are wanted; by default all.

    Raises:
        BundleError: when the graph has another form than Llama's or Qwen's, or a wanted layer keeps a state.
    """
    states = hidden_states_of(model, num_layers)
    if not states:
        raise BundleError(f"{_UNKNOWN}It is no chain of residual additions.")
    hidden = states[after_layers(0)].get_partial_shape()[2].get_length()
    sums = [states[after_layers(i)].get_node() for i in range(num_layers + 1)]
    wanted = range(num_layers) if layers is None else layers
    return [_layer(sums[i], sums[i + 1], hidden, attended) for i in wanted]


def _layer(before: ov.Node, after: ov.Node, hidden: int, attended: int) -> dict[str, Projection]:
    """The products between two states of the residual stream."""
    middle = next((each.get_node() for each in after.input_values() if _is_between(each.get_node(), before)), None)
    if middle is None:
        raise BundleError(f"{_UNKNOWN}A layer does not add to the stream twice.")
    down = product_before(_added(after, middle))
    gate, up = _gate_and_up(multiplied_by(down))
    output = product_before(_added(middle, before))
    # Not beyond the layer's own input: a layer with a state has no attention, and the one before it may have.
    attention = nearest(multiplied_by(output), lambda node: node.get_type_name() in _ATTENTIONS, before)
    attended_by = [attention.input_value(i) for i in range(3)]
    products = [product_before(value) for value in attended_by]
    if any(multiplied_by(node).get_partial_shape()[-1] != hidden for node in products):
        raise BundleError(f"{_UNKNOWN}A layer makes queries, keys or values of a shorter row.")
    alone = len({node.get_name() for node in products}) == len(products)
    parts = [node.output(0) if alone else _part(value, node) for value, node in zip(attended_by, products, strict=True)]
    outputs = dict(zip(NAMES, (*parts, *(node.output(0) for node in (output, gate, up, down))), strict=True))
    if len({(each.get_node().get_name(), each.get_index()) for each in outputs.values()}) < len(outputs):
        raise BundleError(f"{_UNKNOWN}A layer has one product for several of them.")
    num_in = {"self_attn.o_proj": attended, "mlp.down_proj": _width(gate.output(0))}
    return {
        name: Projection(product_before(each), num_in.get(name, hidden), _width(each), each, _begin(each))
        for name, each in outputs.items()
    }


def _part(value: ov.Output, product: ov.Node) -> ov.Output:
    """The part of a product that a value is made of: of the product's split, or all of it."""
    found, seen, waiting = product.output(0), set[str](), [value]
    while waiting:
        each = waiting.pop(0)
        node = each.get_node()
        if node == product or node.get_name() in seen:
            continue
        seen.add(node.get_name())
        if node.get_type_name() == "VariadicSplit":  # others on the way take the part itself apart
            found = each
        waiting += node.input_values()
    return found


def _begin(part: ov.Output) -> int:
    """The first of a product's numbers that are in a part of it."""
    return sum(map(_width, part.get_node().outputs()[: part.get_index()]))


def _width(value: ov.Output) -> int:
    return int(value.get_partial_shape()[-1].get_length())


def _added(total: ov.Node, stream: ov.Node) -> ov.Output:
    """What a part of a layer adds to the residual stream."""
    return next(each for each in total.input_values() if each.get_node() != stream)


def _gate_and_up(rows: ov.Output) -> tuple[ov.Node, ov.Node]:
    """The two products of a gated MLP, by the input of the third: swish(gate) * up."""
    node = nearest(rows, lambda each: each.get_type_name() == "Multiply")
    sides = list(node.input_values())
    gated = next((i for i, each in enumerate(sides) if _has_before(each, ("Swish", "Sigmoid", "Gelu"))), 0)
    return product_before(sides[gated]), product_before(sides[1 - gated])


def product_before(value: ov.Output) -> ov.Node:
    """The nearest product with a matrix of weights, at or before a value."""
    return nearest(value, is_product)


def is_product(node: ov.Node) -> bool:
    """Whether this is a product with a matrix of weights, compressed or not."""
    return node.get_type_name() == "MatMul" and is_weight(node.input_value(1))


def nearest(value: ov.Output, wanted: Callable[[ov.Node], bool], last: ov.Node | None = None) -> ov.Node:
    """The nearest node of a kind, at or before a value, and not before `last`; raises BundleError if there is none."""
    for node in backwards(value, lambda each: wanted(each) or each == last):
        if wanted(node):
            return node
    raise BundleError(f"{_UNKNOWN}One of these is missing.")


def backwards(value: ov.Output, end: Callable[[ov.Node], bool] | None = None) -> Iterator[ov.Node]:
    """The nodes that a value depends on, the nearest first; not what is after a node that is an end."""
    seen, waiting = set[str](), [value.get_node()]
    while waiting:
        node = waiting.pop(0)
        if node.get_name() in seen:
            continue
        seen.add(node.get_name())
        yield node
        if end is None or not end(node):
            waiting += [each.get_node() for each in node.input_values()]


def _has_before(value: ov.Output, kinds: tuple[str, ...]) -> bool:
    return any(node.get_type_name() in kinds for node in backwards(value, is_product))


def _is_between(node: ov.Node, stream: ov.Node) -> bool:
    """Whether a node is the sum that continues the residual stream."""
    return node.get_type_name() == "Add" and any(each.get_node() == stream for each in node.input_values())
