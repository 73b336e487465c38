"""Some layers of a decoder in ONNX as a model of their own, to measure on them what the bits of rows depend on.

    graph = slice_of(path)    # None: the model has an unknown form, or few layers
    OnnxRuntime(path, graph=graph, vocab_size=151_936)

ONNX Runtime chooses the CPU's kernels by operator, attributes, shapes and number of threads. These are the same in all
layers of one form, and a slice has a layer of each form, with the model's own weights. So it has all kernels that the
model has, and the same numbers of rows give the same bits. Outputs of hidden states, which a slice may lack, are sums
that the model calculates in any case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_LEAST_LAYERS = 4
_MOST_SHARE = 0.5  # of all layers; larger slices save too little
_FEW_VALUES = 16  # tensors up to this size are parts of a layer's form: a window, an epsilon, a shape
_PAST = "past_key_values."

_INT64, _STRING = "int64", "string"
# onnx.proto, as far as it is read here: the number of each field, and its type. (The package `onnx` is for exports.)
# All are declared as lists, which single values are read as, too. Other fields are kept as they are.
_PROTO: dict[str, dict[str, tuple[int, str]]] = {
    "Model": {"graph": (7, "Graph")},
    "Graph": {"node": (1, "Node"), "initializer": (5, "Tensor"), "input": (11, "Value"), "output": (12, "Value")},
    "Node": {"input": (1, _STRING), "output": (2, _STRING), "name": (3, _STRING), "attribute": (5, "Attribute")},
    "Attribute": {"g": (6, "Graph"), "graphs": (11, "Graph")},
    "Tensor": {"dims": (1, _INT64), "data_type": (2, _INT64), "name": (8, _STRING)},
    "Value": {"name": (1, _STRING)},
}


def slice_of(path: Path) -> bytes | None:
    """A model of the first layers and the last one. Its weights are in the files of the model at `path`.

    None if the model has an unknown form, or the slice would have most of its layers.
    """
    model = _model_class().FromString(path.read_bytes())
    (graph,) = model.graph
    if not (stages := _stages(graph.node)):
        return None
    num_layers, forms = len(stages) - 1, _forms(graph, stages)
    for kept in range(_LEAST_LAYERS - 1, int(_MOST_SHARE * num_layers)):
        if forms[kept - 1] == forms[-1] and {*forms[:kept]} == {*forms}:
            return model.SerializeToString() if _leave_out(graph, stages, kept) else None
    return None


def _stages(nodes: Iterable[Any]) -> list[list[Any]]:
    """The nodes that the logits depend on: those before the first attention, and those from each one to the next.

    Empty if the form is unknown.
    """
    stages: list[list[Any]] = [[]]
    stage_of: dict[str, int] = {}  # of the values
    for node in _needed(nodes):
        stage = max((stage_of.get(name, 0) for name in node.input if name), default=0)
        layers = {name.split(".")[1] for name in node.input if name.startswith(_PAST)}
        if layers:
            stages.append([])
            stage += 1
        is_next = not layers or (layers == {str(stage - 1)} and len(stages) == stage + 1)
        if not is_next or any(each.g or each.graphs for each in node.attribute):  # whose graphs may read any value
            return []
        stages[stage].append(node)
        stage_of |= dict.fromkeys(node.output, stage)
    return stages


def _forms(graph: Any, stages: Sequence[Sequence[Any]]) -> list[tuple[object, ...]]:
    """For each stage between two attentions, what kernels depend on and how nodes are connected, without names."""
    known: dict[str, object] = {tensor.name[0]: _form_of_tensor(tensor) for tensor in graph.initializer}
    known |= {name: _form_of_node(node) for node in stages[0] if not node.input for name in node.output}  # constants
    known[""] = "none"  # an optional input or output
    forms: list[tuple[object, ...]] = []
    for i, stage in enumerate(stages[1:-1]):
        near = [*(stages[i] if i else ()), *stage]  # values from before the first attention keep their names
        first = len(near) - len(stage)
        places = {name: (at - first, j) for at, node in enumerate(near) for j, name in enumerate(node.output)} | known
        inputs = [tuple(places.get(name, name.replace(f".{i}.", ".")) for name in node.input) for node in stage]
        outputs = [tuple(map(bool, node.output)) for node in stage]
        forms.append(tuple(zip(map(_form_of_node, stage), inputs, outputs, strict=True)))
    return forms


def _form_of_node(node: Any) -> bytes:
    """A node without its inputs' and outputs' names: operator, domain and attributes."""
    copy = type(node)()
    copy.CopyFrom(node)
    for field in ("input", "output", "name"):
        copy.ClearField(field)
    form: bytes = copy.SerializeToString(deterministic=True)
    return form


def _form_of_tensor(tensor: Any) -> tuple[object, ...]:
    """A constant's type and shape; if it is small, its values, too."""
    if math.prod(tensor.dims) > _FEW_VALUES:
        return (*tensor.data_type, *tensor.dims)
    copy = type(tensor)()
    copy.CopyFrom(tensor)
    copy.ClearField("name")
    return (copy.SerializeToString(deterministic=True),)


def _leave_out(graph: Any, stages: Sequence[Sequence[Any]], kept: int) -> bool:
    """Leave out the stages from `kept` + 1 to the last but one. False if others depend on them.

    The last stage reads from stage `kept`, which has the form of the last but one, what it read from that.
    """
    gone = {name for stage in stages[kept + 1 : -1] for node in stage for name in node.output}
    pairs = zip(stages[-2], stages[kept], strict=True)
    instead = {old: new for a, b in pairs for old, new in zip(a.output, b.output, strict=True)}
    for node in stages[-1]:
        node.input[:] = [instead.get(name, name) for name in node.input]
    nodes = _needed([node for stage in (*stages[: kept + 1], stages[-1]) for node in stage])
    used = {name for node in nodes for name in (*node.input, *node.output) if name}
    if gone & used:
        return False
    inputs = [each for each in graph.input if each.name[0] in used or not each.name[0].startswith(_PAST)]
    used |= {each.name[0] for each in inputs}  # initializers are their defaults
    for field, items in (
        ("node", nodes),
        ("initializer", [each for each in graph.initializer if each.name[0] in used]),
        ("input", inputs),
        ("output", [each for each in graph.output if each.name[0] in used]),
    ):
        graph.ClearField(field)
        getattr(graph, field).extend(items)
    return True


def _needed(nodes: Iterable[Any]) -> list[Any]:
    """Those of the nodes, which are in the order of execution, that the logits depend on."""
    wanted, found = {"logits"}, []
    for node in reversed([*nodes]):
        if wanted.intersection(node.output):
            found.append(node)
            wanted.update(filter(None, node.input))
    return found[::-1]


@functools.cache
def _model_class() -> Any:
    """The class of `Model` messages."""
    file = descriptor_pb2.FileDescriptorProto(name="outrider/onnx.proto", package="outrider.onnx", syntax="proto2")
    types = descriptor_pb2.FieldDescriptorProto
    for message, fields in _PROTO.items():
        made = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = made.field.add(name=name, number=number, label=types.LABEL_REPEATED)
            if kind in _PROTO:
                field.type, field.type_name = types.TYPE_MESSAGE, f".{file.package}.{kind}"
            else:
                field.type = types.TYPE_INT64 if kind == _INT64 else types.TYPE_STRING
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))
