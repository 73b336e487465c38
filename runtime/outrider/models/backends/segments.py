"""A decoder in segments of whole layers, each compiled for itself, so that calls may leave layers out.

    segments = Segments.compile(core, model, cuts=(4, 20), device="CPU", properties={})
    segments.create_infer_request()                  # all layers
    segments.only(kept).create_infer_request()       # the same weights, without layers 4 to 19

The hidden states after each segment are handed to the next. They are those that an uncut model has there, bit for bit.
`Segments` and `SegmentsRequest` have as much of OpenVINO's compiled models and requests as `OpenVINOPaged` needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openvino as ov
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.nodes import ints, parameter, result
from outrider.models.backends.taps import above, after_layers, hidden_states_of, num_paged_layers, rows_of

_FROM, _TO = "from_segment", "to_segment"  # the input and the output for hidden states, float32 [n, width]
_UNKNOWN = (
    "A drafter is made of some of the main model's layers, and its graph is none of layers that follow each other. "
    "Load it with drafter='suffix', or without one."
)


def cut(model: ov.Model, cuts: Sequence[int]) -> list[ov.Model]:
    """Cut a decoder with a paged cache before these layers, ascending. The graph cannot be used any more.

    Raises:
        BundleError: when the graph's form is unknown, so that parts of it would be in several segments.
    """
    num_layers = num_paged_layers(model)
    found = hidden_states_of(model, num_layers)
    if not found:
        raise BundleError(_UNKNOWN)
    _count_rows(model, found[after_layers(0)], found[after_layers(num_layers)])
    outer, handed = model.get_results(), list[Any]()
    results: list[list[Any]] = [[]]
    for i in cuts:
        state = found[after_layers(i)]
        readers = state.get_target_inputs()
        width = state.get_partial_shape()[2].get_length()
        given = result(_TO, rows_of(state))
        handed.append(parameter(_FROM, ov.Type.f32, (-1, width)))
        for reader in readers:
            reader.replace_source_output(ops.unsqueeze(handed[-1], ints(1)).output(0))
        results[-1].append(given)
        results.append([])
    for each in outer:
        inputs = _inputs_of([each])
        results[next((i for i, given in enumerate(handed, 1) if given in inputs), 0)].append(each)
    inputs = [*map(_inputs_of, results)]
    if any(sum(each in handed for each in of_one) != (i > 0) for i, of_one in enumerate(inputs)):
        raise BundleError(_UNKNOWN)
    return [ov.Model(*each, f"segment {i}") for i, each in enumerate(zip(results, inputs, strict=True))]


def _count_rows(model: ov.Model, first: ov.Output, last: ov.Output) -> None:
    """Let the shapes [n, 1, width] of values between two hidden states come from the number of tokens.

    Some exports calculate such a shape in one layer and use it in all. Each segment would begin with that layer then.
    """
    tokens = model.input("input_ids").get_node()
    between = above(last.get_node())
    for node in model.get_ops():
        if node.get_type_name() != "ShapeOf" or node.get_name() not in between:
            continue
        count, *others = node.input_value(0).get_partial_shape()
        is_rows = count.is_dynamic and len(others) == 2 and others[0] == 1 and others[1].is_static
        if is_rows and first.get_node().get_name() in above(node):
            kind = node.get_output_element_type(0)
            sizes = ops.constant([1, others[1].get_length()], dtype=kind)
            node.output(0).replace(ops.concat([ops.shape_of(tokens, kind.to_string()), sizes], 0).output(0))


def _inputs_of(results: Iterable[ov.Node]) -> list[Any]:
    """The inputs that some outputs depend on."""
    return [node for node in above(*results).values() if node.get_type_name() == "Parameter"]


@dataclass(frozen=True, slots=True)
class CompiledSegment:
    """A compiled segment: the layers `layers`, with the embedding before the first and the logits after the last."""

    layers: range
    compiled: ov.CompiledModel


class Segments:
    """A compiled model in segments."""

    def __init__(self, segments: Sequence[CompiledSegment]) -> None:
        self._segments = segments

    @classmethod
    def compile(
        cls, core: ov.Core, model: ov.Model, cuts: Iterable[int], device: str, properties: Mapping[str, Any]
    ) -> Segments:
        """Cut a model and compile its segments. Raises as `cut`, and as OpenVINO."""
        cuts = sorted(cuts)
        layers = [range(*ends) for ends in itertools.pairwise((0, *cuts, num_paged_layers(model)))]
        made = [core.compile_model(each, device, {**properties}) for each in cut(model, cuts)]
        return cls([*map(CompiledSegment, layers, made)])

    def only(self, kept: Iterable[int]) -> Segments:
        """The segments with these layers, with the embedding and the logits.

        Raises:
            ValueError: when the model was not cut where that would need it.
        """
        kept = {*kept}
        parts = [part for part in self._segments if kept.issuperset(part.layers)]
        ends = self._segments[0], self._segments[-1]
        if {i for part in parts for i in part.layers} != kept or not all(end in parts for end in ends):
            raise ValueError(f"the model is not cut for calls of layers {sorted(kept)} alone")
        return Segments(parts)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Before which layers it is cut."""
        return tuple(part.layers.start for part in self._segments[1:])

    @property
    def inputs(self) -> list[ov.ConstOutput]:
        """The inputs of all segments, without those for hidden states that are handed over."""
        return [port for part in self._segments for port in part.compiled.inputs if _FROM not in port.get_names()]

    def output(self, name: str) -> ov.ConstOutput:
        """An output, by its name."""
        return next(port for part in self._segments for port in part.compiled.outputs if name in port.get_names())

    def get_property(self, name: str) -> Any:
        """A property, which is the same for all segments."""
        return self._segments[0].compiled.get_property(name)

    def get_context(self) -> ov.RemoteContext:
        """The device's context."""
        return self._segments[0].compiled.get_context()

    def create_infer_request(self) -> SegmentsRequest:
        """A request for all of them, one after the other."""
        return SegmentsRequest([part.compiled.create_infer_request() for part in self._segments])


class SegmentsRequest:
    """Requests of segments. Each one is started by the end of the one before, in OpenVINO's thread."""

    def __init__(self, requests: Sequence[ov.InferRequest]) -> None:
        self._requests = requests
        ports = [(port, each) for each in requests for port in (*each.model_inputs, *each.model_outputs)]
        self._with: dict[str, list[ov.InferRequest]] = {}
        for port, request in ports:
            for name in port.get_names():
                self._with.setdefault(name, []).append(request)
        for first, then in itertools.pairwise(requests):
            (port,) = (port for port in then.model_inputs if _FROM in port.get_names())
            # Each call gives it as many rows as there are tokens, as it does to outputs of its own.
            rows = ov.Tensor(ov.Type.f32, ov.Shape([1, port.partial_shape[1].get_length()]))
            first.set_tensor(_TO, rows)
            then.set_tensor(_FROM, rows)
            first.set_callback(_starting(then), None)

    @property
    def model_inputs(self) -> list[ov.ConstOutput]:
        """The inputs of all segments."""
        return [port for request in self._requests for port in request.model_inputs]

    def set_tensor(self, name: str, tensor: ov.Tensor) -> None:
        """Set the input or output of this name in all segments that have it."""
        for request in self._with[name]:
            request.set_tensor(name, tensor)

    def get_tensor(self, name: str) -> ov.Tensor:
        """An output of the last call."""
        return self._with[name][-1].get_tensor(name)

    def set_callback(self, callback: Callable[[Any], None], userdata: Any) -> None:
        """Call a function at the end of each call."""
        self._requests[-1].set_callback(callback, userdata)

    def start_async(self) -> None:
        """Start a call."""
        self._requests[0].start_async()

    def wait(self) -> None:
        """Wait for the end of the call. Raises RuntimeError when a segment failed."""
        for request in self._requests:
            request.wait()  # at its end, the next one has been started

    def cancel(self) -> None:
        """Nothing: a segment that is cancelled would start the next one all the same."""

    def wait_for(self, timeout: int) -> bool:
        """Whether the call has ended, or ends within so many milliseconds a segment."""
        return all(request.wait_for(timeout) for request in self._requests)


def _starting(then: ov.InferRequest) -> Callable[[Any], None]:
    """A callback that starts a request. It must not refer to its own request: that would never be freed."""
    return lambda _: then.start_async()
