"""Layers that keep a state, each alone: judged by the recurrence in NumPy, and by the operator that replaces it."""

from collections import Counter
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation
from openvino.op import util

from outrider.models.backends.nodes import ints, parameter, result
from outrider_export.direct.recurrences import States, causal_convolution, gated_delta_net, selective_ssm

BATCH, TOKENS = 2, 9
Arrays = dict[str, Any]


def drawn(**shapes: tuple[int, ...]) -> Arrays:
    """Normal numbers float32 [batch, tokens, *shape] by name."""
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=(BATCH, TOKENS, *shape)).astype(np.float32) for name, shape in shapes.items()}


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


WEIGHT, BIAS = (np.random.default_rng(1).normal(size=size).astype(np.float32) for size in ((6, 4), (6,)))
DECAYS = -np.array([0.01, 0.1, 0.5, 1.0], np.float32)  # a token forgets from 1 to 63 %


def convolved(x: Any) -> Any:
    padded = np.concatenate([np.zeros((BATCH, 3, 6), np.float32), x], 1)
    return np.stack([(padded[:, t : t + 4] * WEIGHT.T).sum(1) + BIAS for t in range(TOKENS)], 1)


def delta_ruled(q: Any, k: Any, v: Any, gate: Any, beta: Any) -> Any:
    q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    q, k = (np.repeat(each, v.shape[2] // k.shape[2], 2) for each in (q / np.sqrt(q.shape[-1]), k))
    state, found = np.zeros((*v[:, 0].shape[:2], k.shape[-1], v.shape[-1])), []
    for t in range(TOKENS):
        state = state * np.exp(gate[:, t])[..., None, None]
        change = (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], change)
        found.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return np.stack(found, 1)


def scanned(dt: Any, b: Any, x: Any, c: Any) -> Any:
    b, c = (np.repeat(each, x.shape[2] // b.shape[2], 2) for each in (b, c))
    state, found = np.zeros((*x[:, 0].shape, b.shape[-1])), []
    for t in range(TOKENS):
        state = state * np.exp(DECAYS * dt[:, t])[..., None, None]
        state = state + np.einsum("bh,bhn,bhp->bhpn", dt[:, t], b[:, t], x[:, t])
        found.append(np.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return np.stack(found, 1)


def conv_graph(states: States, x: ov.Node) -> ov.Node:
    return causal_convolution(states, "conv.0", x, WEIGHT, BIAS)


def ssm_graph(states: States, dt: ov.Node, b: ov.Node, x: ov.Node, c: ov.Node) -> ov.Node:
    return selective_ssm(states, "recurrent.0", DECAYS, dt, b, x, c)


def delta_graph(states: States, *inputs: ov.Node) -> ov.Node:
    return gated_delta_net(states, "recurrent.0", *inputs)


def gated(keys: int) -> Arrays:
    found = drawn(q=(keys, 5), k=(keys, 5), v=(4, 3), gate=(4,), beta=(4,))
    return found | {"gate": -0.1 * np.abs(found["gate"]), "beta": sigmoid(found["beta"])}


def scan(groups: int) -> Arrays:
    found = drawn(dt=(4,), b=(groups, 5), x=(4, 3), c=(groups, 5))
    return found | {"dt": np.abs(found["dt"])}


CASES: dict[str, tuple[Any, Any, Arrays, str]] = {
    "convolution": (conv_graph, convolved, drawn(x=(6,)), "PagedCausalConv1D"),
    "delta net": (delta_graph, delta_ruled, gated(4), "PagedGatedDeltaNet"),
    "delta net, grouped": (delta_graph, delta_ruled, gated(2), "PagedGatedDeltaNet"),
    "ssm": (ssm_graph, scanned, scan(1), "PagedSelectiveSSM"),
    "ssm, groups": (ssm_graph, scanned, scan(2), "PagedSelectiveSSM"),
}


def inputs_of(arrays: Arrays) -> dict[str, ov.Node]:
    return {name: parameter(name, ov.Type.f32, (-1, -1, *each.shape[2:])) for name, each in arrays.items()}


def batch_of(x: ov.Node) -> ov.Node:
    return ops.gather(ops.shape_of(x, "i64"), ints(0), ops.constant(np.int64(0)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [(9,), (4, 1, 1, 3)])
def test_a_recurrence_is_what_the_paper_says(case: str, pieces: tuple[int, ...]) -> None:
    make, reference, arrays, _ = CASES[case]
    inputs, beam_idx = inputs_of(arrays), parameter("beam_idx", ov.Type.i32, (-1,))
    states = States(batch_of(next(iter(inputs.values()))), beam_idx)
    made = result("found", make(states, *inputs.values()))
    model = ov.Model([made], states.sinks, [*inputs.values(), beam_idx], "alone")
    request = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    found, begin = [], 0
    for count in pieces:
        part = {name: each[:, begin : begin + count] for name, each in arrays.items()}
        request.infer(part | {"beam_idx": np.arange(BATCH, dtype=np.int32)})
        found.append(request.get_tensor("found").data.copy())
        begin += count
    assert np.concatenate(found, 1) == pytest.approx(reference(**arrays), abs=1e-5)


def cached(states: States, name: str, x: ov.Node) -> ov.Node:
    """Keys or values [batch, 2, tokens, 8] after those of earlier calls."""
    info = util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, 2, -1, 8]), ov.Type.f32, name
    variable = util.Variable(info)
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([states.batch, ints(2, 0, 8)], 0))
    past = ops.gather(ov.op.read_value(empty, variable), states.beam_idx, ops.constant(np.int64(0)))
    whole = ops.concat([past, x], -2)
    states.write(variable, whole)
    return whole


@pytest.mark.parametrize("case", CASES)
def test_openvino_replaces_it_by_an_operator(case: str) -> None:
    """Beside attention, without which OpenVINO replaces nothing."""
    make, _, arrays, name = CASES[case]
    ids, mask, positions = (
        parameter(each, ov.Type.i64, (-1, -1)) for each in ("input_ids", "attention_mask", "position_ids")
    )
    states = States(batch_of(ids), parameter("beam_idx", ov.Type.i32, (-1,)))
    rows = ops.gather(ops.constant(np.ones((7, 16), np.float32)), ids, ops.constant(np.int64(0)))

    def projected(*shape: int) -> ov.Node:
        matrix = ops.constant(np.ones((16, int(np.prod(shape))), np.float32))
        return ops.reshape(ops.matmul(rows, matrix, False, False), ints(0, 0, *shape), special_zero=True)

    found = make(states, *(projected(*each.shape[2:]) for each in arrays.values()))
    heads = ops.transpose(projected(2, 8), ops.constant(np.array([0, 2, 1, 3], np.int32)))
    keys, values = (cached(states, f"past_key_values.0.{kind}", heads) for kind in ("key", "value"))
    seen = ops.reshape(ops.convert(mask, "f32"), ints(0, 1, 1, -1), special_zero=True)
    attended = ops.scaled_dot_product_attention(heads, keys, values, seen)
    attended = ops.transpose(attended, ops.constant(np.array([0, 2, 1, 3], np.int32)))
    joined = ops.concat([ops.reshape(each, ints(0, 0, -1), special_zero=True) for each in (found, attended)], -1)
    width = joined.get_output_partial_shape(0)[2].get_length()
    logits = ops.matmul(joined, ops.constant(np.ones((width, 7), np.float32)), False, False)
    model = ov.Model([result("logits", logits)], states.sinks, [ids, mask, positions, states.beam_idx], "beside")
    paged_attention_transformation(model)
    types = Counter(node.get_type_name() for node in model.get_ops())
    assert (types[name], types["Loop"], types["ReadValue"]) == (1, 0, 0)
