"""A few layers of a decoder as a model of their own, to measure on them what holds for the whole model.

    slices = find_slices(core, path, geometry)
    slices.layers.whole(seconds_of_small, seconds_of_large)    # what the same call of the whole model takes

In most models all layers have the same shapes, and so the same kernels. Which setting is fastest, and whether rows have
the same bits in any batch, are properties of a slice, too. What a layer costs is the difference of two slices.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.taps import above, after_layers, hidden_states_of, is_weight, read_ir

_FEW_VALUES = 16  # most integers of a shape, which is a part of a layer's form
_MOST_KINDS = 4
_MOST_MORE = 4  # layers that the larger slice has more than the smaller one
_MOST_SHARE = 0.5  # of all layers; larger slices save too little


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of two slices: one of each kind; and more of the most frequent kind.

    times: weights of the layers that the small slice lacks, as a multiple of those that the large one has more. ratios:
    the whole model's number of layers and weights, as multiples of the large slice's.
    """

    small: list[int]
    large: list[int]
    times: float
    ratios: tuple[float, float]

    def whole(self, small: float, large: float) -> float:
        """The whole model's seconds for a call, from those of both slices.

        What costs time is in the weights or in the number of layers. So these limit it, where the noise of two times
        would be multiplied.
        """
        least, most = sorted(self.ratios)
        return min(max(small + self.times * (large - small), least * large), most * large)


@dataclass(frozen=True, slots=True)
class Slices:
    """Two slices of a decoder, with a paged cache."""

    small: ov.Model
    large: ov.Model
    layers: Layers


def find_slices(
    core: ov.Core, path: Path, num_layers: int, windows: Sequence[int | None] | None = None, kinds: Sequence[str] = ()
) -> Slices | None:
    """Slices of the decoder at `path`; None if its graph has an unknown form, or they would have most of its layers.

    windows: the sliding window of each layer, None for one without attention, which are checked; None: not known.
    kinds: of the layers' states, which are checked; none if all have attention.
    Raises as `read_decoder`.
    """
    model = read_ir(core, path)
    layers = choose_layers(model, num_layers)
    if layers is None:
        return None

    def build(kept: Sequence[int]) -> ov.Model:
        sliced = keep_layers(model.clone(), num_layers, kept)
        found = [windows[i] for i in kept] if windows is not None else []
        return read_decoder(
            core,
            sliced,
            windows=None if windows is None else [n for n in found if n is not None],
            kinds=[kinds[i] for i in kept] if kinds else (),
        )

    return Slices(build(layers.small), build(layers.large), layers)


def choose_layers(model: ov.Model, num_layers: int) -> Layers | None:
    """The layers of a stateful decoder for its slices; None as `find_slices`."""
    found = hidden_states_of(model, num_layers)
    if not found:
        return None
    states = [found[after_layers(i)] for i in range(num_layers + 1)]
    embedding = states[0].get_node().get_name()  # layers may use its shape
    forms, sizes = zip(*(_form(*ends, embedding) for ends in itertools.pairwise(states)), strict=True)
    _, of_matrix = _form(states[-1], model.output("logits").get_node().input_value(0), embedding)
    ((common, _),) = Counter(forms).most_common(1)
    small = sorted({form: i for i, form in reversed([*enumerate(forms)])}.values())
    rest = [i for i, form in enumerate(forms) if form == common and i not in small]
    size = max(sizes[forms.index(common)], 1)
    more = rest[: min(max(round(of_matrix / (2 * size)), 1), _MOST_MORE)]
    large = sorted([*small, *more])
    if len(small) > _MOST_KINDS or not more or len(large) > _MOST_SHARE * num_layers:
        return None
    added, all_ = max(sum(sizes[i] for i in more), 1), sum(sizes)
    weights = (of_matrix + all_) / max(of_matrix + sum(sizes[i] for i in large), 1)
    missing = all_ - sum(sizes[i] for i in small)
    return Layers(small, large, missing / added, (num_layers / len(large), weights))


def keep_layers(model: ov.Model, num_layers: int, kept: Sequence[int]) -> ov.Model:
    """A stateful decoder with some of its layers, ascending. The given graph cannot be used any more."""
    found = hidden_states_of(model, num_layers)
    readers = [[*found[after_layers(i)].get_target_inputs()] for i in range(num_layers + 1)]
    end = 0  # of the layers that have been joined
    for first in (*kept, num_layers):
        if first != end:
            for reader in readers[first]:
                reader.replace_source_output(found[after_layers(end)])
        end = first + 1
    logits = model.output("logits").get_node()
    names = above(logits)
    cached = {node.get_variable_id() for node in names.values() if node.get_type_name() == "ReadValue"}
    sinks = [sink for sink in model.get_sinks() if sink.get_variable_id() in cached]
    inputs = above(logits, *sinks)
    parameters = [each for each in model.get_parameters() if each.get_name() in inputs]
    return ov.Model([logits], sinks, parameters, f"{model.get_friendly_name()} {list(kept)}")


def _form(before: ov.Output, after: ov.Output, embedding: str) -> tuple[str, int]:
    """The form of the graph between two hidden states, and the bytes of its weights.

    Its operations count once each, as all layers but the first depend on the first one's keys, too, for the mask. A
    number that the sum is multiplied by may differ, and so may weights, however few they are.
    """
    parts, size = set[str](), 0
    weights = filter(is_weight, after.get_node().input_values())
    scales = [each.get_node().get_name() for each in weights if math.prod(each.get_shape()) == 1]
    for node in above(after.get_node(), ends=(before.get_node().get_name(), embedding, *scales)).values():
        said = f"{node.get_type_name()} {node.get_output_element_type(0)}"
        if node.get_type_name() == "Constant":
            said += f" {node.get_output_shape(0)}"
            if _is_form(node):
                said += f" {node.get_data().tolist()}"
            else:
                size += node.get_byte_size()
        parts.add(said)
    return hashlib.sha256("\n".join([*sorted(parts), str(size)]).encode()).hexdigest(), size


def _is_form(constant: ov.Node) -> bool:
    """Whether a constant is a part of a layer's form: a window, an epsilon, a shape.

    A gate of a delta net has a number for each head, and so have the scales of its weights in 8 bits.
    """
    count, is_real = math.prod(constant.get_output_shape(0)), constant.get_output_element_type(0).is_real()
    readers = constant.output(0).get_target_inputs()
    of_weight = all(is_weight(reader.get_node().output(0)) for reader in readers)
    return count <= (1 if is_real else _FEW_VALUES) and not of_weight
