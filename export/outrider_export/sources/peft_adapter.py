"""A LoRA adapter as PEFT publishes it: a folder with adapter_config.json and adapter_model.safetensors.

The change of a module is scale · up · down, with scale = lora_alpha / r, or lora_alpha / √r for rank-stabilised ones
(`LoraConfig` and `LoraLayer.get_delta_weight` in PEFT 0.17; Kalajdzievski 2023, "A rank stabilization scaling factor
for fine-tuning with LoRA"). Variants that are more than that are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.hashes import sha256_of
from outrider.errors import ExportError
from outrider.system.files import shown
from outrider_export.sources.safetensors import read_tensors
from outrider_export.sources.source import configuring, read_json

Matrix = NDArray[np.float32]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MOST_CHARACTERS = 300  # of a module's name
_EXPRESSION = re.compile(r"[^*+?{}()|]*([*+][^*+?{}()|]*){0,2}")  # a key of rank_pattern or alpha_pattern
_PLAIN = re.compile(r"[\w.-]+")  # a key that is a name, not an expression
_MOST_EXPRESSIONS = 100
# Weights larger than float16's largest number can overflow in float32, too, which spoils rows without the adapter:
# infinity times 0 is no number.
_LARGEST = 65504.0
_LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)\..+")
# Fields that do not change what an adapter calculates, or are read here.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "use_rslora", "eva_config",
}  # fmt: skip
# Ways to begin that take a part out of the model's own weights; without that, the adapter does not fit them.
_FROM_THE_WEIGHTS = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter adds to a module's weights: scale · up · down. down: float32 [r, in]. up: float32 [out, r]."""

    down: Matrix
    up: Matrix
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return len(self.down)


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter. modules: its changes by the modules' names. sha256: of its weights' file."""

    id: str
    sha256: str
    modules: dict[str, Change]
    base: str | None  # the model that it says it was trained for

    @property
    def rank(self) -> int:
        """The largest of all."""
        return max(change.rank for change in self.modules.values())


def read_adapter(folder: Path) -> LoraAdapter:
    """Read an adapter's folder.

    Raises:
        ExportError: when it is none, is of another kind, or is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise ExportError(
            f"{shown(folder)} is no adapter: it has no {CONFIG}. Name the folder that PEFT's save_pretrained wrote."
        )
    if not (folder / WEIGHTS).is_file():
        raise ExportError(f"{folder} has no {WEIGHTS}. Save the adapter with safe_serialization=True.")
    config = read_json(folder / CONFIG)
    with configuring(folder / CONFIG):
        return _read(folder, config)


def _read(folder: Path, config: dict[str, Any]) -> LoraAdapter:
    _check_config(folder, config)
    found: dict[str, dict[str, Matrix]] = {}
    for name, tensor in read_tensors(folder, WEIGHTS).items():
        match = _NAME.fullmatch(name)
        if match is None or len(name) > _MOST_CHARACTERS:
            raise ExportError(
                f"{folder / WEIGHTS} has {shown(repr(name))}, which is no lora_A or lora_B of a module. Adapters with "
                "more than these, such as trained embeddings, are not read."
            )
        found.setdefault(match["module"], {})[match["side"]] = tensor
    if not found:
        raise ExportError(f"{folder / WEIGHTS} has no lora_A and lora_B. Save the adapter again.")
    ranks, alphas = (_Pattern(config.get(f"{name}_pattern")) for name in ("rank", "alpha"))
    modules = {}
    for name, sides in found.items():
        rank, alpha = ranks.find(name, config["r"]), alphas.find(name, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        modules[name] = _change(folder, name, sides, rank, scale)
    _check_targets(folder, config, modules)
    base = config.get("base_model_name_or_path")
    base = base if isinstance(base, str) and base else None
    return LoraAdapter(folder.resolve().name, sha256_of(folder / WEIGHTS), modules, base)


def check_fits(adapter: LoraAdapter, find: Callable[[str], tuple[int, ...] | str | None]) -> None:
    """Check that an adapter can be merged into a model. find: a module's shape, or what it is instead of a matrix.

    Raises:
        ExportError: when the model has no such module (None), or one of another kind or shape.
    """
    wanted = f"Name an adapter that was trained for this model{f', not for {adapter.base}' if adapter.base else ''}."
    for name, change in adapter.modules.items():
        found, shape = find(name), (change.up.shape[0], change.down.shape[1])
        changes = f"The adapter {adapter.id} changes {name}"
        if found is None:
            raise ExportError(f"{changes}, which the model does not have. {wanted}")
        if isinstance(found, str):
            raise ExportError(f"{changes}, which {found}. Only linear layers of their own are merged.")
        if found != shape:
            raise ExportError(f"{changes} by {[*shape]} weights, and the model has {[*found]} there. {wanted}")


def layer_of(module: str) -> tuple[int, str] | None:
    """The layer's number, and the name within the layer; None for a module that is in no layer."""
    match = _LAYER.fullmatch(module)
    return None if match is None else (int(match[1]), module[match.end(1) + 1 :])


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    """Raise ExportError for other kinds of adapters than LoRA's plain one."""
    path = folder / CONFIG
    if config.get("peft_type") != "LORA":
        raise ExportError(f"{path} has peft_type {shown(repr(config.get('peft_type')))}, and only LORA is read.")
    if config.get("bias", "none") != "none":
        raise ExportError(
            f"{path} has bias={shown(repr(config['bias']))}: it trains biases, too, and only 'none' is read."
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_FROM_THE_WEIGHTS):
        raise ExportError(
            f"{path} has init_lora_weights={shown(repr(start))}, with which a part of the model's weights was taken "
            "out. Convert it to a plain adapter: PEFT's save_pretrained with path_initial_model_for_weight_conversion."
        )
    for name, value in config.items():
        if name not in _KNOWN and value:
            raise ExportError(
                f"{path} has {shown(name)}={str(value)[:60]!r}, and such adapters are not read. Only plain LoRA is: A "
                "and B of linear layers."
            )
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), int | float) or not 0 < config[name] < math.inf:
            raise ExportError(f"{path} has {name}={shown(repr(config.get(name)))}, which has to be a number above 0.")


def _change(folder: Path, module: str, sides: dict[str, Matrix], rank: int, scale: float) -> Change:
    """A module's matrices, checked."""
    path = folder / WEIGHTS
    if missing := {"A", "B"} - sides.keys():
        raise ExportError(
            f"{path} has no lora_{missing.pop()} for {module}, but the other one. Save the adapter again."
        )
    down, up = (sides[side] for side in "AB")
    if down.ndim != 2 or up.ndim != 2 or len(down) != rank or up.shape[1] != rank:
        raise ExportError(
            f"{path} has lora_A {[*down.shape]} and lora_B {[*up.shape]} for {module}, and {CONFIG} says rank {rank}: "
            f"[{rank}, in] and [out, {rank}] are wanted. Only linear layers are read."
        )
    for side, matrix, factor in (("A", down, 1.0), ("B", up, scale)):
        where = f"in lora_{side} of {module}"
        if matrix.dtype != np.float32:
            raise ExportError(f"{path} has {matrix.dtype} {where}, and floats are wanted. Save the adapter again.")
        if not np.isfinite(matrix).all():
            raise ExportError(f"{path} has numbers that are not finite {where}. Train it again.")
        if not (largest := abs(factor) * float(np.abs(matrix).max(initial=0))) <= _LARGEST:
            raise ExportError(
                f"{path} has weights up to {largest:.3g} {where}, scaled by {factor:.3g}; they have to be at most "
                f"{_LARGEST:,.0f}. Check lora_alpha and alpha_pattern in {CONFIG}."
            )
    return Change(down, up, scale)


class _Pattern:
    """rank_pattern or alpha_pattern: values by the names of modules, ends of names, or expressions for these.

    The first key that fits counts (`get_pattern_key` in PEFT).

    Raises:
        ValueError: for expressions that could take for ever, or are none.
    """

    def __init__(self, values: dict[str, Any] | None) -> None:
        self._plain: dict[str, tuple[int, Any]] = {}
        self._expressions: list[tuple[int, re.Pattern[str], Any]] = []
        for i, (key, value) in enumerate((values or {}).items()):
            if _PLAIN.fullmatch(key):
                self._plain[key] = (i, value)
                continue
            if not _EXPRESSION.fullmatch(key):
                raise ValueError(f"{shown(repr(key))} is no module's name with at most two * and + and no groups")
            if len(self._expressions) == _MOST_EXPRESSIONS:
                raise ValueError(f"it has more than {_MOST_EXPRESSIONS} expressions for names of modules")
            try:
                self._expressions.append((i, re.compile(rf"(.*\.)?({key})$"), value))
            except re.error as error:
                raise ValueError(f"{shown(repr(key))} is no expression: {error}") from error

    def find(self, module: str, default: Any) -> Any:
        """The module's value."""
        parts = module.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        found = [self._plain[end] for end in ends if end in self._plain]
        found += [(i, value) for i, expression, value in self._expressions if expression.match(module)]
        return min(found, key=lambda each: each[0])[1] if found else default


def _check_targets(folder: Path, config: dict[str, Any], modules: Iterable[str]) -> None:
    """Raise ExportError if the file lacks modules that the configuration names, or layers."""
    targets = config.get("target_modules")
    if isinstance(targets, list):
        for target in targets:
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                raise ExportError(
                    f"{folder / WEIGHTS} has nothing for {target!r}, which {CONFIG} names in target_modules. Save the "
                    "adapter again."
                )
    layers = config.get("layers_to_transform")
    wanted = {layers} if isinstance(layers, int) else {*(layers or ())}
    found = {place[0] for place in map(layer_of, modules) if place is not None}
    if wanted and found != wanted:
        raise ExportError(
            f"{folder / WEIGHTS} has layers {sorted(found)}, and {CONFIG} says layers_to_transform={sorted(wanted)}. "
            "Save the adapter again."
        )
