"""Rounds a packed EAGLE-3 head to 4 bits in groups of 32 by GPTQ, as the demo's is.

    python bench/scripts/round_head.py BUNDLE HEAD DATA OUTPUT

HEAD is the packed drafter of BUNDLE's main model, in 8 bits or more. DATA is the folder `data` of the work folder of
`outrider distill BUNDLE --kind eagle3 --keep-work`: some ten thousand tokens are enough, as nothing is trained. Columns
of a matrix are rounded one after the other, and each error is made up for by the columns after it, weighted by how the
head's inputs go together. Prints the tokens of a round on held-out text before and after.

Source: GPTQ (Frantar et al. 2022), algorithm 1; the scale of a group is the best of a few by the squared error.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops

from outrider.bundle import read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import MODEL_NAMES, PROPOSED_NAME
from outrider_distill.data import Data
from outrider_distill.main_model import read_teacher
from outrider_distill.train.files import build, new_config
from outrider_distill.train.fit import TOKENS_IN_USUAL_BATCH, evaluate
from outrider_distill.train.places import Reach
from outrider_export.direct.codes import pack
from outrider_export.heads.packed import PACKED_NAME

GROUP, LARGEST = 32, 15
SHRINKS = np.arange(0.7, 1.01, 0.03)  # of a group's range, that are tried
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
IR = MODEL_NAMES["openvino"][0]


def main(bundle: Path, source: Path, data_folder: Path, output: Path) -> None:
    """Round it, and write the packed folder."""
    tensors, proposed, data = read_tensors(source / IR), np.load(source / PROPOSED_NAME), Data(data_folder)
    head = make_head(bundle, tensors, proposed)
    print(f"before: {evaluate(head, data).mean_length():.3f} tokens a round on held-out text")
    made = {}
    for name, hessian in hessians(head, data).items():
        codes, zero_points, scales = rounded(tensors[name], hessian)
        made[name] = node(codes, zero_points, scales)
        weights = (codes.astype(np.float32) - zero_points[..., None]) * scales[..., None].astype(np.float32)
        module = head.get_submodule(name.removesuffix(".weight"))
        module.weight.data = torch.from_numpy(weights.reshape(module.weight.shape))
    print(f"after: {evaluate(head, data).mean_length():.3f}")
    write(output, source, tensors, made)


def read_tensors(path: Path) -> dict[str, Any]:
    """A drafter's weights by name, float32."""
    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return {output.any_name: np.array(values) for output, values in compiled({}).items()}


def make_head(bundle: Path, tensors: dict[str, Any], proposed: Any) -> Any:
    """The head as distilling trains it."""
    teacher = read_teacher(read_bundle(bundle))
    head = build(new_config("eagle3", teacher.shape, draft_vocab_size=len(proposed)), teacher.embedding.float())
    state = {name: torch.from_numpy(tensors[name]) for name in head.state_dict() if name in tensors}
    ids = torch.from_numpy(proposed.astype(np.int64))
    state["d2t"], state["t2d"] = ids - torch.arange(len(ids)), torch.isin(torch.arange(head.vocab_size), ids)
    head.load_state_dict(state)
    return head.eval()


def hessians(head: Any, data: Data) -> dict[str, Any]:
    """Of each matrix: the sum of the outer products of its inputs, float64 [columns, columns]."""
    found: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def see(_: Any, given: Any) -> None:
            rows = given[0].reshape(-1, given[0].shape[-1]).double()
            found[name] = found.get(name, 0) + rows.T @ rows

        return see

    matrices = {name: module for name, module in head.named_modules() if isinstance(module, torch.nn.Linear)}
    hooks = [module.register_forward_pre_hook(watch(f"{name}.weight")) for name, module in matrices.items()]
    with torch.no_grad():
        for batch in data.batches(TOKENS_IN_USUAL_BATCH, 0):
            head.loss(data.read(batch), Reach(head.num_places))
    for hook in hooks:
        hook.remove()
    return found


def rounded(values: Any, hessian: Any) -> tuple[Any, Any, Any]:
    """A matrix's codes [rows, groups, 32], zero points and scales [rows, groups]."""
    left = torch.from_numpy(values).double()
    places = torch.arange(left.shape[1])
    hessian[places, places] += DAMPING * hessian.diagonal().mean()
    weights = hessian.diagonal()
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    codes, zero_points, scales = [], [], []
    for begin in range(0, left.shape[1], GROUP):
        end = begin + GROUP
        part, errors = left[:, begin:end], torch.zeros(len(left), GROUP, dtype=torch.float64)
        scale, zero_point = best_scale(part, weights[begin:end])
        for i in range(GROUP):
            code = (part[:, i] / scale + zero_point).round().clamp(0, LARGEST)
            codes.append(code)
            errors[:, i] = (part[:, i] - (code - zero_point) * scale) / inverse[begin + i, begin + i]
            part[:, i + 1 :] -= errors[:, i, None] * inverse[begin + i, begin + i + 1 : end]
        left[:, end:] -= errors @ inverse[begin:end, end:]
        scales.append(scale)
        zero_points.append(zero_point)
    whole = torch.stack(codes, 1).reshape(len(left), -1, GROUP).numpy().astype(np.uint8)
    points = torch.stack(zero_points, 1).numpy().astype(np.uint8)
    return whole, points, torch.stack(scales, 1).numpy().astype(np.float16)


def best_scale(part: Any, weights: Any) -> tuple[Any, Any]:
    """The scale and the zero point of each row of a group: those with the least error, by its columns' weights."""
    lowest, highest = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
    best = [torch.full((len(part),), torch.inf, dtype=torch.float64), lowest, lowest]
    for shrink in SHRINKS:
        scale = ((highest - lowest) * shrink / LARGEST).clamp(min=1e-6).half().double()
        zero_point = (-lowest * shrink / scale).round().clamp(0, LARGEST)
        codes = (part / scale[:, None] + zero_point[:, None]).round().clamp(0, LARGEST)
        error = (((codes - zero_point[:, None]) * scale[:, None] - part) ** 2 * weights).sum(1)
        is_less = error < best[0]
        best = [torch.where(is_less, new, old) for new, old in zip((error, scale, zero_point), best, strict=True)]
    return best[1], best[2]


def node(codes: Any, zero_points: Any, scales: Any) -> ov.Node:
    """The matrix float32 [rows, columns] of constants of 4 bits, which OpenVINO multiplies by as they are."""
    centred = ops.subtract(ops.convert(pack(codes), "f16"), ops.convert(pack(zero_points[..., None]), "f16"))
    scaled = ops.multiply(centred, ops.constant(scales[..., None]))
    shape = ops.constant(np.array([len(codes), codes[0].size], np.int64))
    return ops.convert(ops.reshape(scaled, shape, special_zero=False), "f32")


def write(output: Path, source: Path, tensors: dict[str, Any], made: dict[str, ov.Node]) -> None:
    """The packed folder, with all that `source` has besides."""
    output.mkdir()
    results = []
    for name, values in tensors.items():
        result = ops.result((made.get(name) or ops.constant(values)).output(0))
        result.set_friendly_name(f"weights/{name}")
        result.output(0).set_names({name})
        results.append(result)
    ov.save_model(ov.Model(results, []), output / IR, compress_to_fp16=False)
    (output / PROPOSED_NAME).write_bytes((source / PROPOSED_NAME).read_bytes())
    content = json.loads((source / PACKED_NAME).read_bytes())
    content["entry"]["model"]["weights"] = "int4"
    content["files"] = [{"path": each.path, "size": each.size, "sha256": each.sha256} for each in list_files(output)]
    (output / PACKED_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
