"""A decoder's ONNX graph: what it says of itself, the inputs that a bundle wants of it, and its files.

    model = load(path)                                  # the graph alone; weights stay in their files
    add_rows(model)
    save(model, path.parent, folder)                    # model.onnx, model.onnx.data
    check_onnx(folder / "model.onnx", geometry)

A bundle's model takes input_ids, attention_mask, position_ids where it wants them, and past_key_values.{i}.key and
.value; it gives logits, present.{i}.key and .value. The runtime binds one buffer [1, kv heads, longest, head size] a
tensor as past and as present, which only GroupQueryAttention allows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError, one_line
from outrider_export.keep import link_or_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from outrider.bundle import Geometry

MODEL = "model.onnx"
ROWS = ("rows_begin", "rows_end")
EXTRA = "extra_rows"
FLOAT, INT64 = 1, 7  # onnx.TensorProto's numbers for them
_INPUTS = ("input_ids", "attention_mask", "position_ids")
_CACHE = ("key", "value")
_PRODUCTS = ("MatMulNBits", "MatMulBnb4", "MatMul", "FusedMatMul")
_ELEMENTWISE = ("Mul", "Div", "Add", "Sub", "Tanh", "Cast", "Identity")
_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
# They choose one scale for the numbers of all rows.
_MIX_ROWS = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
_EXPORT_IT = "Export the model from its checkpoint instead: outrider export MODEL --format onnx."


@dataclass(frozen=True)
class Shape:
    """What a graph says of its model; None where it does not say."""

    num_layers: int  # that have a cache
    num_heads: int | None
    num_kv_heads: int | None  # None, too, where the layers differ
    head_size: int | None
    logits_width: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def import_onnx() -> Any:
    """The package `onnx`.

    Raises:
        ExportError: with the command that installs it.
    """
    try:
        import onnx
    except ImportError as error:
        raise ExportError(
            'Models in ONNX need onnx, which is not installed. Run: pip install "outrider[onnx-export]"'
        ) from error
    return onnx


def load(path: Path) -> Any:
    """The `onnx.ModelProto` at `path`, without the weights that lie in files of their own.

    Raises:
        ExportError: if it is missing or damaged, or the package `onnx` is.
    """
    onnx = import_onnx()
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, which it names differently from version to version
        raise ExportError(f"{path} is not an ONNX model that can be read: {one_line(error)}") from error


def shape_of(model: Any) -> Shape:
    """Look at a graph whose inputs and outputs have a bundle's names."""
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    outputs = {value.name: value for value in graph.output}
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    keys = [value for name, value in inputs.items() if _is_past(name) and name.endswith(".key")]
    num_heads = _only({_attribute(node, "num_heads") for node in nodes})
    head_size = _only({_dim(key, 3) for key in keys})
    if head_size is None and nodes and num_heads:
        written = {value.name: value for value in graph.value_info}
        hidden = _only({_dim(written.get(node.output[0]), 2) for node in nodes})
        head_size = hidden // num_heads if hidden else None
    return Shape(
        num_layers=len(keys),
        num_heads=num_heads,
        num_kv_heads=_only({_attribute(node, "kv_num_heads") for node in nodes}),
        head_size=head_size,
        logits_width=_dim(outputs.get("logits"), 2),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def weights_of(model: Any) -> str:
    """ "int8" or "int4", after the bits of most of its products' matrices; "fp32" where none is quantised."""
    held = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    bits: Counter[int] = Counter()
    for node in model.graph.node:
        if node.op_type in ("MatMulNBits", "MatMulBnb4"):
            bits[_attribute(node, "bits") or 4] += 1
        elif node.op_type == "DequantizeLinear" and (width := _BITS.get(_type_name(held.get(node.input[0], 0)))):
            bits[width] += 1
    return f"int{bits.most_common(1)[0][0]}" if bits else "fp32"


def add_rows(model: Any) -> None:
    """Let a model make the logits of some rows only: rows_begin ≤ row < rows_end, int64 [1] each, all if left out.

    The output matrix is then applied to those rows, and `logits` is float32 [batch, rows, logits width]. A model that
    has these inputs is left as it is.

    Raises:
        ExportError: if `logits` is not made by a product with a matrix, of all rows.
    """
    graph = model.graph
    if ROWS[0] in (value.name for value in graph.input):
        return
    head = find_head(graph)
    if _dim(_output(graph, "logits"), 1) is not None:
        raise ExportError(
            f"The model gives the logits of its last token only; drafts are checked by more. {_EXPORT_IT}"
        )
    add_default(model, ROWS[0], 0)
    add_default(model, ROWS[1], 2**63 - 1)
    axis = _constant("rows_axis", 1, [1])
    graph.initializer.append(axis)
    rows = _node("Slice", [head.input[0], *ROWS, axis.name], ["/rows/output_0"], "/rows")
    head.input[0] = rows.output[0]
    graph.node.insert(list(graph.node).index(head), rows)
    _output(graph, "logits").type.tensor_type.shape.dim[1].dim_param = "rows"


def add_extra_rows(model: Any) -> None:
    """Let attention, and nothing else, see rows of zeros behind the tokens: extra_rows, int64 [1], none if left out.

    Attention takes another kernel for one row than for more, so a token alone gets other bits than with others; the
    products with weights need not. With a row more for attention, a token alone has the bits that it has with others,
    without a second row going through all of the model. attention_mask then counts the extra rows, too. A model that
    has this input, or whose attention is told positions or biases of each row, is left as it is.
    """
    graph = model.graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if EXTRA in (value.name for value in graph.input) or any(any(node.input[9:11]) for node in attentions):
        return
    add_default(model, EXTRA, 0)
    first, axis = _constant("extra_first", 0, [1]), _constant("extra_axis", 1, [1])
    before = _constant("extra_before", 0, [4])
    graph.initializer.extend([first, axis, before])
    count = _node("Shape", ["input_ids"], ["/extra/count"], "/extra/Shape", start=1, end=2)
    pads = _node("Concat", [before.name, EXTRA, first.name], ["/extra/pads"], "/extra/Concat", axis=0)
    for node in attentions:
        at = list(graph.node).index(node)
        for i, name in enumerate(node.input[:3]):
            if name:  # one packed input, or three
                pad = _node("Pad", [name, pads.output[0]], [f"{node.name}/extra/{i}"], f"{node.name}/extra/Pad_{i}")
                node.input[i] = pad.output[0]
                graph.node.insert(at, pad)
        whole = f"{node.name}/extra/output"
        inputs = [whole, first.name, count.output[0], axis.name]
        cut = _node("Slice", inputs, [node.output[0]], f"{node.name}/extra/Slice")
        node.output[0] = whole
        graph.node.insert(list(graph.node).index(node) + 1, cut)
    for made in (pads, count):
        graph.node.insert(0, made)


def add_default(model: Any, name: str, value: int) -> None:
    """Give the int64 input `name` a value that it has when it is left out; added, as int64 [1], if it is not there."""
    from onnx import helper

    given = {value.name: value for value in model.graph.input}
    if name not in given:
        given[name] = helper.make_tensor_value_info(name, INT64, [1])
        model.graph.input.append(given[name])
    model.graph.initializer.append(_constant(name, value, [1] * len(given[name].type.tensor_type.shape.dim)))


def write_shape(model: Any, geometry: Geometry) -> None:
    """Write into inputs and outputs what the runtime reads there, where the graph leaves it open."""
    for value in (*model.graph.input, *model.graph.output):
        if _is_past(value.name) or value.name.startswith("present."):
            dims = {1: geometry.num_kv_heads, 3: geometry.head_size}
        else:
            dims = {2: geometry.logits_width} if value.name == "logits" else {}
        for axis, dim in dims.items():
            value.type.tensor_type.shape.dim[axis].dim_value = dim


def rename(model: Any, names: dict[str, str]) -> None:
    """Give tensors of the graph other names, wherever they stand.

    Raises:
        ExportError: if a new name is another tensor's already.
    """
    names = {old: new for old, new in names.items() if old != new}
    for place in _name_lists(model.graph):
        if taken := set(names.values()) & set(place) - set(names):
            raise ExportError(f"The model has a tensor of its own named {sorted(taken)[0]}. {_EXPORT_IT}")
        for i, name in enumerate(place):
            if name in names:
                place[i] = names[name]
    for value in _named(model.graph):
        value.name = names.get(value.name, value.name)


def data_files(model: Any, folder: Path) -> list[str]:
    """The names of the files in `folder` that hold the model's weights, in the order in which it needs them.

    Raises:
        ExportError: if one lies elsewhere, is missing or cut short.
    """
    ends: dict[str, int] = {}
    for entry in _external(model):
        name = entry["location"]
        if PurePosixPath(name).is_absolute() or {"..", "\\", ":"} & {*PurePosixPath(name).parts, *name}:
            raise ExportError(
                f"{folder} has weights in {name!r}, which is not inside it. They are not read from there."
            )
        end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
        ends[name] = max(ends.get(name, 0), end)
    for name, end in ends.items():
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name} is missing, which holds the model's weights. Download it, too.")
        if (size := (folder / name).stat().st_size) < end:
            raise ExportError(f"{folder / name} has {size:,} bytes of {end:,}. Download it again.")
    return list(ends)


def save(model: Any, source: Path, folder: Path, place: Callable[[Path, Path], object] = link_or_copy) -> None:
    """Write model.onnx into `folder`, and its weights from `source` as model.onnx.data, model.onnx.data_1, ….

    `place(file, copy)` brings a file of weights to its place. The model's weights lie in those files afterwards.

    Raises:
        ExportError: if a file of weights is not there, or not whole.
    """
    import onnx

    names = {name: f"{MODEL}.data" + (f"_{i}" if i else "") for i, name in enumerate(data_files(model, source))}
    folder.mkdir(parents=True, exist_ok=True)
    for name, ours in names.items():
        place(source / name, folder / ours)
    for tensor in _tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names[entry.value]
    onnx.save(model, folder / MODEL)


def check_onnx(path: Path, geometry: Geometry) -> None:
    """Whether the model at `path` can go into a bundle as it is, and has the shape that its source promised.

    Raises:
        ExportError: naming what differs.
    """
    model = load(path)
    check_graph(model, path, geometry)
    if missing := [name for name in ROWS if name not in (value.name for value in model.graph.input)]:
        raise ExportError(f"{path} has no input {missing[0]}: it was not finished. Export it again.")
    data_files(model, path.parent)


def check_graph(model: Any, path: Path, geometry: Geometry) -> None:
    """As `check_onnx`, for a model that may still lack rows_begin and rows_end.

    Raises:
        ExportError: naming what was found, what is needed and the next step.
    """
    shape = shape_of(model)
    _check_names(model, path, shape)
    _check_attention(model.graph, path, shape.num_layers)
    if mixing := sorted({node.op_type for node in model.graph.node} & set(_MIX_ROWS)):
        raise ExportError(
            f"{path} rounds the numbers of all rows by one scale ({mixing[0]}), so that drafts would change the text. "
            "Choose a file whose weights alone are quantised, such as model_q4.onnx or model.onnx."
        )
    found = (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.logits_width)
    promised = (
        geometry.num_layers, geometry.num_heads, geometry.num_kv_heads, geometry.head_size, geometry.logits_width
    )  # fmt: skip
    pairs = list(zip(("layers", "heads", "kv heads", "head size", "logits"), found, promised, strict=True))
    # A head size or a number of logits that the graph leaves open is the configuration's.
    if any(here not in (None, there) for _, here, there in pairs):
        raise ExportError(
            f"{path} has {', '.join(f'{here} {what}' for what, here, _ in pairs)}, where its configuration promises "
            f"{', '.join(f'{there} {what}' for what, _, there in pairs)}: they do not belong together."
        )


def _check_names(model: Any, path: Path, shape: Shape) -> None:
    """Whether the inputs and outputs are those of a bundle's model, with the types that they have there."""
    optional = {tensor.name for tensor in model.graph.initializer} | {"position_ids"}
    pasts, presents = _cache_names("past_key_values", shape.num_layers), _cache_names("present", shape.num_layers)
    inputs = {"input_ids", "attention_mask", *pasts}
    lacking = sorted((inputs - set(shape.inputs)) | ({"logits", *presents} - set(shape.outputs)))
    unknown = sorted(set(shape.inputs) - inputs - optional)
    if not shape.num_layers:
        lacking = ["past_key_values.0.key"]
    if lacking or unknown:
        what = f"has no {lacking[0]}" if lacking else f"wants an input {unknown[0]}, which Outrider does not know"
        raise ExportError(
            f"{path} {what}. A model takes input_ids, attention_mask, perhaps position_ids, and "
            "past_key_values.N.key and .value; it gives logits, present.N.key and .value, N from 0. " + _EXPORT_IT
        )
    for value in (*model.graph.input, *model.graph.output):
        kind, expected = value.type.tensor_type.elem_type, INT64 if value.name in (*_INPUTS, *ROWS, EXTRA) else FLOAT
        if kind != expected and (value.name not in optional or value.name in _INPUTS):
            raise ExportError(
                f"{path} has {value.name} in {_type_name(kind)}; Outrider runs models whose cache and logits are in "
                "float32, and whose ids are in int64. Choose another file of the "
                "model, such as model.onnx or model_q4.onnx."
            )
    given = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    for name, rank in (("logits", 3), *((name, 4) for name in (*pasts, *presents))):
        if (found := len(given[name].type.tensor_type.shape.dim)) != rank:
            raise ExportError(f"{path} has {name} with {found} dimensions, not {rank}. {_EXPORT_IT}")
    for name, axis in (("input_ids", 1), (pasts[0], 2)):
        if (fixed := _dim(given[name], axis)) is not None:
            raise ExportError(f"{path} takes {name} of {fixed} tokens only, where any number has to do. {_EXPORT_IT}")


def _check_attention(graph: Any, path: Path, num_layers: int) -> None:
    """Whether each layer's attention is one GroupQueryAttention from its past to its present."""
    reader = {name: node for node in graph.node for name in node.input if _is_past(name)}
    for i in range(num_layers):
        past, present = ([f"{kind}.{i}.{half}" for half in _CACHE] for kind in ("past_key_values", "present"))
        node = reader.get(past[0])
        if node is None or node.op_type != "GroupQueryAttention":
            op = "nothing" if node is None else node.op_type
            raise ExportError(
                f"The attention in {path} is not GroupQueryAttention: layer {i}'s past keys go to {op}, and the cache "
                f"would be copied for every token. {_EXPORT_IT}"
            )
        if list(node.input[3:5]) != past or list(node.output[1:3]) != present:
            raise ExportError(f"{path} does not take layer {i}'s cache from {past} to {present}. {_EXPORT_IT}")


def find_head(graph: Any) -> Any:
    """The node that multiplies the last hidden states by the output matrix."""
    maker = {name: node for node in graph.node for name in node.output}
    fixed = {tensor.name for tensor in graph.initializer}
    name, ops = "logits", []
    while (node := maker.get(name)) is not None:
        if node.op_type in _PRODUCTS:
            return node
        ops.append(node.op_type)
        moving = [i for i in node.input if i and i not in fixed and not _is_constant(maker.get(i))]
        if node.op_type not in _ELEMENTWISE or len(moving) != 1:
            break
        name = moving[0]
    raise ExportError(
        f"The model's logits are made by {' of '.join(ops) or 'nothing'}; Outrider looks for a product with the output "
        f"matrix ({' or '.join(_PRODUCTS)}) there. {_EXPORT_IT}"
    )


def _is_constant(node: Any) -> bool:
    return node is not None and node.op_type == "Constant"


def _is_past(name: str) -> bool:
    return name.startswith("past_key_values.")


def _cache_names(kind: str, num_layers: int) -> list[str]:
    return [f"{kind}.{i}.{half}" for i in range(num_layers) for half in _CACHE]


def _output(graph: Any, name: str) -> Any:
    return next((value for value in graph.output if value.name == name), None)


def _dim(value: Any, axis: int) -> int | None:
    """A dimension of an input or output, where it is a number."""
    dims = value.type.tensor_type.shape.dim if value is not None else ()
    return int(dims[axis].dim_value) if axis < len(dims) and dims[axis].HasField("dim_value") else None


def _attribute(node: Any, name: str) -> int | None:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), None)


def _only(values: set[int | None]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _type_name(kind: int) -> str:
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(kind)).lower()


def _constant(name: str, value: int, dims: list[int]) -> Any:
    from onnx import helper

    return helper.make_tensor(name, INT64, dims, [value] * prod(dims))


def _node(op: str, inputs: list[str], outputs: list[str], name: str, **attributes: int) -> Any:
    from onnx import helper

    return helper.make_node(op, inputs, outputs, name=name, **attributes)


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside its nodes, as the branches of an If."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _name_lists(graph: Any) -> Iterator[Any]:
    for inner in _graphs(graph):
        for node in inner.node:
            yield node.input
            yield node.output


def _named(graph: Any) -> Iterator[Any]:
    for inner in _graphs(graph):
        for group in (inner.input, inner.output, inner.value_info, inner.initializer):
            yield from group


def _tensors(model: Any) -> Iterator[Any]:
    """Every tensor of constants in the model, those with their data in another file."""
    from onnx.external_data_helper import uses_external_data

    for graph in _graphs(model.graph):
        held = [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
        yield from (tensor for tensor in (*graph.initializer, *held) if uses_external_data(tensor))


def _external(model: Any) -> list[dict[str, str]]:
    """Location, offset and length of each tensor whose data is in another file."""
    return [{entry.key: entry.value for entry in tensor.external_data} for tensor in _tensors(model)]
