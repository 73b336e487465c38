"""A random decoder in ONNX, in the form that onnxruntime-genai's model builder writes, without the builder."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from outrider.bundle.manifest import Geometry
from outrider_export.onnx.inputs import add_extra_rows, add_rows


def decoder(geometry: Geometry, seed: int = 0) -> Any:
    """The graph, an `onnx.ModelProto`, in float32."""
    rng = np.random.default_rng(seed)
    nodes: list[Any] = []
    tensors: list[Any] = []
    hidden, heads, size, width = (
        geometry.hidden_size, geometry.num_heads, geometry.head_size, geometry.logits_width
    )  # fmt: skip

    def tensor(name: str, values: Any) -> str:
        tensors.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def matrix(name: str, *shape: int) -> str:
        return tensor(name, (rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32))

    def node(kind: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, outputs, outputs[0], **attributes))
        return outputs[0]

    def norm(name: str, root: str, skip: str, *more: str) -> str:
        gamma = tensor(f"{name}.weight", rng.uniform(0.5, 1.5, hidden).astype(np.float32))
        if not skip:
            return node("SimplifiedLayerNormalization", [root, gamma], name, axis=-1, epsilon=1e-6)
        kind, inputs = "SkipSimplifiedLayerNormalization", [root, skip, gamma]
        return node(kind, inputs, name, *more, domain="com.microsoft", epsilon=1e-6)

    one = tensor("one", np.array([1]))
    seen = node(
        "Cast", [node("Sub", [node("ReduceSum", ["attention_mask", one], "sum"), one], "past")], "seqlens", to=6
    )
    total = node("Cast", [node("Gather", [node("Shape", ["attention_mask"], "shape"), one], "length")], "total", to=6)
    stream = node(
        "Gather",
        [tensor("embedding", rng.standard_normal((width, hidden)).astype(np.float32)), "input_ids"],
        "embedded",
    )
    skip = ""
    for i in range(geometry.num_layers):
        rows = norm(f"{i}.input_norm", stream, skip, "", "", f"{i}.before")
        stream = f"{i}.before" if skip else stream
        packed = [node("MatMul", [rows, matrix(f"{i}.{n}.weight", hidden, heads * size)], f"{i}.{n}") for n in "qkv"]
        pasts, presents = (
            [f"{kind}.{i}.{half}" for half in ("key", "value")] for kind in ("past_key_values", "present")
        )
        read = node(
            "GroupQueryAttention", [*packed, *pasts, seen, total], f"{i}.read", *presents,
            domain="com.microsoft", num_heads=heads, kv_num_heads=heads,
        )  # fmt: skip
        attended = node("MatMul", [read, matrix(f"{i}.o.weight", heads * size, hidden)], f"{i}.attended")
        rows = norm(f"{i}.middle_norm", stream, attended, "", "", f"{i}.middle")
        wide = node(
            "Tanh", [node("MatMul", [rows, matrix(f"{i}.up.weight", hidden, 2 * hidden)], f"{i}.up")], f"{i}.wide"
        )
        stream, skip = (
            f"{i}.middle",
            node("MatMul", [wide, matrix(f"{i}.down.weight", 2 * hidden, hidden)], f"{i}.down"),
        )
    node("MatMul", [norm("final_norm", stream, skip), matrix("lm_head", hidden, width)], "logits")

    def port(name: str, kind: int, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    ints, floats = TensorProto.INT64, TensorProto.FLOAT
    caches = [f"{i}.{half}" for i in range(geometry.num_layers) for half in ("key", "value")]
    inputs = [port(name, ints, 1, name) for name in ("input_ids", "attention_mask")]
    inputs += [port(f"past_key_values.{name}", floats, 1, heads, "past", size) for name in caches]
    outputs = [port("logits", floats, 1, "n", width)]
    outputs += [port(f"present.{name}", floats, 1, heads, "all", size) for name in caches]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "decoder", inputs, outputs, tensors), opset_imports=opsets)
    model.ir_version = 10
    add_rows(model)
    add_extra_rows(model)
    return model
