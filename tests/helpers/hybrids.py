"""Toy models whose layers keep states with a long memory, so that a wrong row of a state shows in all later tokens."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.bundle import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import MODEL_NAMES, StateKind, write_manifest
from outrider.models.backends.nodes import ints
from outrider.testing import save_toy_bundle
from outrider.testing.openvino_toy import openvino_toy
from outrider.testing.tokenizer import TOY_ALPHABET
from outrider.testing.weights import HIDDEN, LAYERS, random_weights
from outrider_export.direct.recurrences import States, causal_convolution, gated_delta_net, selective_ssm

KINDS: dict[str, StateKind] = {"conv": "short_convolution", "gdn": "gated_delta_net", "ssm": "selective_ssm"}
_HEADS, _SIZE, _KEY = 2, HIDDEN // 2, 4


def save_hybrid(
    folder: Path,
    kind: str,
    *,
    draft_noise: float = 0.05,
    vocab_size: int = len(TOY_ALPHABET),
    tokenizer: Path | None = None,
) -> Bundle:
    """A toy bundle of a main and a draft model with such layers: "conv", "gdn" or "ssm".

    tokenizer: as `save_toy_bundle` has it.
    """
    options: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer": tokenizer}
    bundle = save_toy_bundle(folder, states=True, draft_noise=draft_noise, padded=False, **options)
    if kind == "conv":
        return bundle
    for role, noise in (("main", 0.0), ("draft", draft_noise)):
        model = openvino_toy(
            random_weights(vocab_size, noise=noise, states=True), {"gdn": _delta_net, "ssm": _ssm}[kind]
        )
        ov.save_model(model, folder / role / MODEL_NAMES["openvino"][0], compress_to_fp16=False)
    manifest = bundle.manifest

    def with_kind(entry: Any) -> Any:
        layer_states = (KINDS[kind], "") * LAYERS
        geometry = msgspec.structs.replace(entry.geometry, layer_states=layer_states)
        return msgspec.structs.replace(entry, geometry=geometry)

    drafter = msgspec.structs.replace(manifest.drafters[0], model=with_kind(manifest.drafters[0].model))
    changed = msgspec.structs.replace(
        manifest, main=with_kind(manifest.main), drafters=(drafter,), files=list_files(folder)
    )
    write_manifest(folder, changed)
    return read_bundle(folder)


class _Projections:
    """Random projections of a layer, the same in each model."""

    def __init__(self, x: ov.Node, number: int) -> None:
        self._x, self._rng = x, np.random.default_rng(number)

    def random(self, *shape: int) -> Any:
        return self._rng.standard_normal(shape).astype(np.float32) * np.float32(HIDDEN**-0.5)

    def to(self, *shape: int) -> Any:
        matrix = ops.constant(self.random(HIDDEN, int(np.prod(shape))))
        return ops.reshape(ops.matmul(self._x, matrix, False, False), ints(0, 0, *shape), special_zero=True)


def _delta_net(x: ov.Node, i: int, batch: ov.Node, beam_idx: ov.Node, sinks: list[ov.Node]) -> Any:
    """A convolution and a gated delta net, which keeps 0.5 % less of the past with each token."""
    states, rng = States(batch, beam_idx, sinks), np.random.default_rng(50 + i)
    filters = rng.standard_normal((HIDDEN, 4)).astype(np.float32)
    made = _Projections(causal_convolution(states, f"conv.{i}", x, filters), i)
    gate = ops.multiply(ops.sigmoid(made.to(_HEADS)), ops.constant(np.float32(-0.01)))
    inputs = made.to(_HEADS, _KEY), made.to(_HEADS, _KEY), made.to(_HEADS, _SIZE), gate, ops.sigmoid(made.to(_HEADS))
    found = gated_delta_net(states, f"recurrent.{i}", *inputs)
    return ops.multiply(ops.reshape(found, ints(0, 0, HIDDEN), special_zero=True), ops.constant(np.float32(2)))


def _ssm(x: ov.Node, i: int, batch: ov.Node, beam_idx: ov.Node, sinks: list[ov.Node]) -> Any:
    """A convolution and Mamba-2, which forgets 1 % with each token."""
    states, rng = States(batch, beam_idx, sinks), np.random.default_rng(50 + i)
    filters = rng.standard_normal((HIDDEN, 4)).astype(np.float32)
    made = _Projections(causal_convolution(states, f"conv.{i}", x, filters), i)
    dt, decays = ops.sigmoid(made.to(_HEADS)), np.full(_HEADS, -0.02, np.float32)
    inputs = dt, made.to(1, _KEY), made.to(_HEADS, _SIZE), made.to(1, _KEY)
    found = selective_ssm(states, f"recurrent.{i}", decays, *inputs)
    return ops.tanh(ops.reshape(found, ints(0, 0, HIDDEN), special_zero=True))
