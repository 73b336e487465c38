"""What OpenVINO's CPU plugin answers after a cancelled call: see "Cancelled and failed calls" in docs/exactness.md."""

import contextlib
import random
import time
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

rng, width, sizes = np.random.default_rng(0), 384, [1, 2, 5, 17, 64, 200, 400]
x = ops.parameter([-1, width], np.float32)
h, count = x.output(0), ops.gather(ops.shape_of(x), np.int64(0), np.int64(0))
for _ in range(60):
    weights = (rng.standard_normal((width, width)) / width**0.5).astype(np.float32)
    rows = ops.reshape(ops.range(np.int64(0), count, np.int64(1), "i64"), np.array([-1, 1]), False)
    h = ops.add(h, ops.divide(ops.convert(rows, "f32"), np.float32(1000))).output(0)
    h = ops.add(h, ops.tanh(ops.matmul(h, weights, False, False))).output(0)
model = ov.Core().compile_model(ov.Model([ops.result(h)], [x], "layers"), "CPU", {"INFERENCE_NUM_THREADS": 2})
request, rows = model.create_infer_request(), rng.standard_normal((400, width)).astype(np.float32)


def start(num_rows: int) -> None:
    request.set_input_tensor(ov.Tensor(rows[:num_rows].copy()))
    request.start_async()


def result() -> Any:
    request.wait()
    return request.get_output_tensor(0).data.copy()


right = {}
for num_rows in sizes:
    start(num_rows)
    right[num_rows] = result()
failed = wrong = 0
for _ in range(40):
    start(random.choice(sizes))
    time.sleep(0.02 * random.random())
    request.cancel()
    with contextlib.suppress(RuntimeError):  # it was cancelled
        request.wait()
    num_rows = random.choice(sizes)
    start(num_rows)
    try:
        wrong += not np.array_equal(result(), right[num_rows])
    except RuntimeError:
        failed += 1
print(f"OpenVINO {ov.__version__}: of 40 calls after cancelled ones {failed} failed, {wrong} gave other numbers")
