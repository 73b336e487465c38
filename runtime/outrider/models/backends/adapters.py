"""LoRA adapters in a main model's graph: several at once, each row of a call with its own or with none.

    adapters = Adapters((Adapter("pirate", path, rank=16),))
    add_adapters(core, model, adapters, attended=576)    # the graph has a new input, `ADAPTERS`
    adapters.mask(["pirate", None])                      # for two rows: the second has no adapter

Every product y = x · W that an adapter changes becomes y + ((x · A) * mask) · B. A and B hold the matrices of all
adapters side by side, and the mask is 1 in the columns of the row's own adapter and 0 elsewhere. What is multiplied by
0 adds exactly 0, so that rows with different adapters share a call, and no row depends on the others' adapters.

Source: Hu et al. 2021, "LoRA: low-rank adaptation of large language models"; rows with different adapters in one
product as in Sheng et al. 2023, "S-LoRA: serving thousands of concurrent LoRA adapters".
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.nodes import ints, parameter
from outrider.models.backends.projections import NAMES, Projection, projections_of
from outrider.models.backends.taps import num_paged_layers, read_ir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

ADAPTERS = "adapters"  # the graph's input, float32 [rows, width]
# An adapter's columns are rounded up to these, so that kernels divide them alike wherever they begin.
_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a bundle.

    path: an IR with outputs "layers.i.NAME.A" float32 [r, in] and "layers.i.NAME.B" float32 [out, r], for names of
    `projections.NAMES`. The scale is in B. rank: the largest r. targets: the names of the products that it changes.
    """

    name: str
    path: Path
    rank: int
    targets: tuple[str, ...] = ()

    @property
    def num_columns(self) -> int:
        """Its columns of the mask."""
        return -(-self.rank // _COLUMNS) * _COLUMNS


@dataclass(frozen=True)
class Adapters:
    """The adapters that a main model is loaded with."""

    items: tuple[Adapter, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, which requests choose one by."""
        return tuple(each.name for each in self.items)

    @cached_property
    def columns(self) -> dict[str, slice]:
        """The columns of each adapter."""
        ends = [0, *itertools.accumulate(each.num_columns for each in self.items)]
        return {name: slice(*both) for name, both in zip(self.names, itertools.pairwise(ends), strict=True)}

    @property
    def width(self) -> int:
        """The columns of all of them."""
        return sum(each.num_columns for each in self.items)

    @property
    def shapes(self) -> list[tuple[int, tuple[str, ...]]]:
        """What the time of a call depends on: their ranks and targets."""
        return [(each.rank, each.targets) for each in self.items]

    def mask(self, rows: Sequence[str | None]) -> Matrix:
        """The graph's input float32 [rows, width] for rows with these adapters, or none."""
        made = np.zeros((len(rows), self.width), dtype=np.float32)
        for i, name in enumerate(rows):
            if name is not None:
                made[i, self.columns[name]] = 1
        return made


def read_matrices(core: ov.Core, adapter: Adapter) -> dict[str, Matrix]:
    """An adapter's matrices by the names of the file's outputs.

    Raises:
        BundleError: when the file cannot be read.
    """
    outputs = read_ir(core, adapter.path).outputs
    return {name: each.get_node().input_value(0).get_node().get_data() for each in outputs for name in each.get_names()}


def add_adapters(core: ov.Core, model: ov.Model, adapters: Adapters, *, attended: int) -> None:
    """Let a graph with a paged cache apply adapters. The last of all changes to the graph.

    attended: numbers of all attention heads' outputs, side by side.

    Raises:
        BundleError: when the graph's form is unknown, or an adapter does not fit.
    """
    layers = projections_of(model, num_paged_layers(model), attended=attended)
    found = {each.name: read_matrices(core, each) for each in adapters.items}
    for name, matrices in found.items():
        check_matrices(name, matrices, layers)
    mask = parameter(ADAPTERS, ov.Type.f32, (-1, adapters.width))
    parts: dict[tuple[str, ...], ov.Node] = {}  # the mask's columns for some of the adapters
    for i, layer in enumerate(layers):
        for name, projection in layer.items():
            place = f"layers.{i}.{name}"
            own = tuple(each for each, matrices in found.items() if f"{place}.A" in matrices)
            if not own:
                continue
            if own not in parts:
                wanted = np.concatenate([np.r_[adapters.columns[each]] for each in own])
                part = mask if own == adapters.names else ops.gather(mask, ints(*wanted), ints(1))
                parts[own] = ops.unsqueeze(part, ints(1))
            pieces = [(found[each][f"{place}.A"], found[each][f"{place}.B"]) for each in own]
            widths = [each.num_columns for each in adapters.items if each.name in own]
            _branch(projection, *_stacked(pieces, widths), parts[own])
    model.add_parameters([mask])
    model.validate_nodes_and_infer_types()


def _stacked(pieces: Sequence[tuple[Matrix, Matrix]], widths: Sequence[int]) -> tuple[Matrix, Matrix]:
    """A float32 [columns, in] and B float32 [out, columns] of several adapters, each in its own columns."""
    downs = [np.pad(a, ((0, width - len(a)), (0, 0))) for (a, _), width in zip(pieces, widths, strict=True)]
    ups = [np.pad(b, ((0, 0), (0, width - b.shape[1]))) for (_, b), width in zip(pieces, widths, strict=True)]
    return np.concatenate(downs), np.concatenate(ups, axis=1)


def _branch(projection: Projection, down: Matrix, up: Matrix, mask: ov.Node) -> None:
    """Add ((x · A) * mask) · B to a product, after its bias if it has one.

    Before the bias, the CPU plugin would not calculate product and bias in one kernel, whose bits differ in bf16.
    """
    product = projection.output
    readers = product.get_target_inputs()
    if len(readers) == 1:
        (reader,) = readers
        bias = reader.get_node()
        others = [each.get_node() for each in bias.input_values() if each != product]
        if bias.get_type_name() == "Add" and [each.get_type_name() for each in others] == ["Constant"]:
            product = bias.output(0)
            readers = product.get_target_inputs()
    rows = projection.rows
    kind = product.get_element_type()
    if rows.get_element_type().to_string() != "f32":
        rows = ops.convert(rows, "f32").output(0)
    lowered = ops.multiply(ops.matmul(rows, ops.constant(down), False, True), mask)
    change = ops.matmul(lowered, ops.constant(up), False, True)
    if kind.to_string() != "f32":
        change = ops.convert(change, kind)
    total = ops.add(product, change).output(0)
    for reader in readers:
        reader.replace_source_output(total)


def check_matrices(adapter: str, matrices: dict[str, Matrix], layers: Sequence[dict[str, Projection]]) -> None:
    """Raise BundleError for a matrix of an adapter without a product in the model, or that does not fit it."""
    for name, matrix in matrices.items():
        _, number, *rest, side = name.split(".")
        place, i = ".".join(rest), int(number)
        if i >= len(layers):
            raise BundleError(
                f"The adapter '{adapter}' is for a model with layer {i}, and this one's layers are 0 to "
                f"{len(layers) - 1}. Name an adapter that was trained for this model."
            )
        if place not in layers[i]:
            raise BundleError(
                f"The adapter '{adapter}' changes {place}, and it can be {', '.join(NAMES)} here. Merge it at export: "
                "outrider export MODEL --adapter FOLDER."
            )
        projection = layers[i][place]
        wanted, has = (projection.num_in, matrix.shape[1]) if side == "A" else (projection.num_out, matrix.shape[0])
        if wanted != has:
            raise BundleError(
                f"The adapter '{adapter}' changes {place} of layer {i} with lora_{side} {[*matrix.shape]}, and this "
                f"model has {wanted:,} numbers {'before' if side == 'A' else 'after'} it instead of {has:,}. Name an "
                "adapter that was trained for this model."
            )
