"""The formats of drafters that read the main model's hidden states, as weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider.models.backends.heads.block import WINDOW
from outrider.models.backends.heads.recurrent import NORM_FIRST
from outrider.models.backends.taps import LAST, after_layers
from outrider_export.diet.diet import read_trained
from outrider_export.direct.rope import rope_of
from outrider_export.heads import assistant, dspark, qwen
from outrider_export.sources import gguf_drafter
from outrider_export.sources.gguf_file import DIVISORS
from outrider_export.sources.safetensors import read_tensors
from outrider_export.sources.source import architectures_of, configuring, read_json

_ROTATED = re.compile(r"\.[qk]_(proj|norm)\.(weight|bias)\Z")
EMBEDDING, MATRIX = "embed_tokens.weight", "lm_head.weight"  # where they are a drafter's own
# By `architectures` in config.json, or `speculators_model_type`.
KINDS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "LlamaMTP": "mtp",
    "Qwen3NextMTP": "mtp",
    "Qwen3_5MTP": "mtp",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "Lfm2DSparkDraftModel": "dspark",
    "DSparkDraftModel": "dspark",  # SpecForge's
    "Gemma4AssistantForCausalLM": "assistant",
    "Gemma4UnifiedAssistantForCausalLM": "assistant",
}


@dataclass(frozen=True)
class HeadCheckpoint:
    """A drafter's checkpoint.

    features: the main model's hidden states that it reads. tensors: by the names that the graphs use. proposed: int32
    [n], the main ids of its logits, ascending, or of those that it was trained for; None for all. num_places: the most
    tokens that it drafts in one call; None: it drafts them one by one. mask_token_id: stands for tokens that are to be
    drafted.
    """

    kind: str
    features: tuple[str, ...]
    tensors: dict[str, NDArray[np.float32]]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    context_length: int
    proposed: NDArray[np.int32] | None = None
    num_places: int | None = None
    mask_token_id: int | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def uses_main_matrix(self) -> bool:
        """Whether it has no output matrix of its own."""
        return not any(MATRIX in name for name in self.tensors)

    def check_features(self, found: Container[str], num_layers: int) -> None:
        """Check that the main model has the hidden states that are read. found: the names of those it has.

        Raises:
            ExportError: with the first that is missing.
        """
        if missing := [each for each in self.features if each not in found]:
            first, last = after_layers(0), after_layers(num_layers)
            has = f"{first} to {last}. Name the main model that the drafter was trained for."
            if first not in found:
                has = "none in a form that is known. Export the main model from its checkpoint."
            raise ExportError(f"The drafter reads hidden states {missing[0]!r}, and the main model's graph has {has}")

    @property
    def uses_main_embedding(self) -> bool:
        """Whether it has no embedding of its own."""
        return EMBEDDING not in self.tensors


def kind_of_head(folder: Path) -> str | None:
    """What kind of drafter a checkpoint folder, or a GGUF file, has; None if it is a model."""
    if folder.is_file():
        return gguf_drafter.kind_of_file(folder)
    config = read_json(folder / "config.json")
    names = [*architectures_of(config), str(config.get("speculators_model_type"))]
    return next((KINDS[name] for name in names if name in KINDS), "eagle3" if "eagle3" in names else None)


def read_head(folder: Path, main: Geometry) -> HeadCheckpoint:
    """Read a checkpoint folder or a GGUF file of a drafter for a main model of this shape.

    Raises:
        ExportError: when it is none, is damaged, or does not fit.
    """
    kind = kind_of_head(folder)
    if kind is None:
        raise ExportError(f"{folder} is no drafter of a kind that is known: {', '.join(sorted(_READERS))}.")
    if folder.is_file():
        head = make_head(kind, *gguf_drafter.read_file(folder), main, folder)
        return _divided(head, gguf_drafter.divisors_of(folder), folder)
    return make_head(kind, read_json(folder / "config.json"), read_tensors(folder), main, folder)


def _divided(head: HeadCheckpoint, divisors: NDArray[np.float32] | None, path: Path) -> HeadCheckpoint:
    """The drafter with its rotary frequencies divided by those of its file."""
    if divisors is None:
        return head
    frequencies = head.tensors["rotary.frequencies"]
    if frequencies.size != divisors.size:
        raise ExportError(
            f"{path} has {divisors.size:,} divisors of rotary frequencies ({DIVISORS}), and the drafter's "
            f"heads have {frequencies.size:,} frequencies. Fetch it again."
        )
    return dataclasses.replace(head, tensors=head.tensors | {"rotary.frequencies": frequencies / divisors})


def make_head(
    kind: str, config: dict[str, Any], tensors: dict[str, NDArray[Any]], main: Geometry, where: Path
) -> HeadCheckpoint:
    """The drafter of a configuration and tensors. where: the checkpoint's folder, or the file of both.

    Raises:
        ExportError: when it is damaged, or does not fit.
    """
    with configuring(where if where.is_file() else where / "config.json"):
        config = {**config, **(config.get("transformer_layer_config") or {})}
        try:
            head = _READERS[kind](config, tensors, main)
        except KeyError as error:
            raise ExportError(f"{where}: config.json has no {error}, which {kind} drafters have. Add it.") from error
    if head.uses_main_matrix:
        head = dataclasses.replace(head, proposed=read_trained(where, main.logits_width))
    if head.hidden_size != main.hidden_size:
        raise ExportError(
            f"{where} is for a main model with hidden_size {head.hidden_size:,}, and this one has "
            f"{main.hidden_size:,}. Name the main model that it was trained for."
        )
    return head


def _eagle3(config: dict[str, Any], tensors: dict[str, NDArray[Any]], main: Geometry) -> HeadCheckpoint:
    renamed = _renamed(tensors, {r"^layers\.0\.": "midlayer.", r"^model\.": ""})
    # SpecForge and SGLang number the layers from 0; vLLM numbers the hidden states, of which 0 is the embedding.
    layer_ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = [i + 1 for i in layer_ids or ()] or config.get("eagle_aux_hidden_state_layer_ids")
    n = main.num_layers
    layers = tuple(taps or (2, n // 2, n - 3))
    width = len(layers) * main.hidden_size
    if "fc.weight" in renamed and renamed["fc.weight"].shape[1] != width:
        raise ExportError(
            f"The EAGLE-3 drafter reads hidden states of {renamed['fc.weight'].shape[1]:,} numbers, and {len(layers)} "
            f"layers of this main model have {width:,}. Name the main model that it was trained for."
        )
    proposed = None
    if "d2t" in renamed:
        own = renamed["d2t"].astype(np.int64)
        proposed, renamed = _in_order(own + np.arange(len(own)), renamed)
    head = _decoder("eagle3", config, renamed, 1)
    width += main.hidden_size
    return dataclasses.replace(
        head,
        features=tuple(map(after_layers, layers)),
        proposed=None if proposed is None or len(proposed) == config["vocab_size"] else proposed,
        numbers=head.numbers | {"hidden_width": width} | ({NORM_FIRST: 1.0} if config.get(NORM_FIRST) else {}),
    )


def _mtp(config: dict[str, Any], tensors: dict[str, NDArray[Any]], main: Geometry) -> HeadCheckpoint:
    renamed = _renamed(tensors, {r"^mtp\.": ""})
    numbers: dict[str, float] = {}
    if qwen.is_of_family(config):
        config, renamed = qwen.from_qwen(config, renamed)
        numbers = qwen.numbers_of(config, renamed)
    head = _decoder("mtp", config, renamed, 1)
    numbers |= {"hidden_width": main.hidden_size}
    return dataclasses.replace(head, features=(LAST,), numbers=head.numbers | numbers)


def _dflash(config: dict[str, Any], tensors: dict[str, NDArray[Any]], main: Geometry) -> HeadCheckpoint:  # noqa: ARG001
    own = config.get("dflash_config") or {}
    if not own.get("target_layer_ids") or own.get("mask_token_id") is None:
        raise ExportError("config.json has no dflash_config with target_layer_ids and mask_token_id. Export it again.")
    is_second, numbers = "DFlash2DraftModel" in architectures_of(config), dict[str, float]()
    tensors = _renamed(tensors, {r"^model\.": ""})
    if is_second:
        tensors, numbers = dspark.split_selector({**own, **config}, tensors)
        numbers["soft_cap"] = float(own.get("final_logit_softcapping") or 0)
    head = _decoder("dflash2" if is_second else "dflash", _of_qwen3(config), tensors, int(config["num_hidden_layers"]))
    return dataclasses.replace(
        head,
        numbers=head.numbers | numbers | _windows(config),
        features=tuple(after_layers(i + 1) for i in own["target_layer_ids"]),
        num_places=int(config.get("block_size") or own.get("block_size", 16)) - 1,
        mask_token_id=int(own["mask_token_id"]),
    )


def _dspark(config: dict[str, Any], tensors: dict[str, NDArray[Any]], main: Geometry) -> HeadCheckpoint:  # noqa: ARG001
    """Its embedding and output matrix are copies of the main model's, and are not read."""
    config, tensors = dspark.flat(config), _renamed(tensors, {r"^(?:model|logit_head)\.": ""})
    if config.get("sample_from_anchor") is False:
        raise ExportError(
            "config.json has sample_from_anchor false, and only blocks whose newest token drafts, too, are known. Take "
            "a DSpark drafter that was trained so."
        )
    tensors, numbers = dspark.split_heads(config, tensors), dict[str, float]()
    if "Gemma4DSparkModel" in architectures_of(config):
        config, tensors, numbers = dspark.from_gemma(config, tensors)
    else:
        config = _of_qwen3(config)
    head = _decoder("dspark", config, tensors, int(config["num_hidden_layers"]))
    soft_cap = {"soft_cap": float(config.get("final_logit_softcapping") or 0)}
    return dataclasses.replace(
        head,
        features=tuple(after_layers(i + 1) for i in config["target_layer_ids"]),
        num_places=int(config["block_size"]),
        mask_token_id=int(config["mask_token_id"]),
        numbers=head.numbers | soft_cap | numbers | _windows(config),
    )


def _decoder(kind: str, config: dict[str, Any], tensors: dict[str, NDArray[Any]], num_layers: int) -> HeadCheckpoint:
    """A drafter of decoder layers, with the numbers that their graph needs."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    size = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    queries = next((len(each) for name, each in tensors.items() if name.endswith("q_proj.weight")), 0)
    if heads * size != queries:
        raise ExportError(
            f"config.json has {heads:,} heads of {size:,} numbers, and the drafter's weights have {queries:,} numbers "
            "for them (q_proj). Fetch the checkpoint again."
        )
    frequencies, scale = _rotary(config, size)
    # Drafters for LFM2 rotate neighbours.
    interleaved = not config.get("rope_is_neox_style", "Lfm2DSparkDraftModel" not in architectures_of(config))
    tensors, frequencies = in_halves(tensors, size, frequencies, interleaved=interleaved)
    floats = {name: values for name, values in tensors.items() if values.dtype == np.float32}
    numbers = {
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": size,
        "num_layers": num_layers,
        "rotary.scale": scale,
    }
    return HeadCheckpoint(
        kind=kind,
        features=(),
        tensors=floats | {"rotary.frequencies": frequencies[None]},
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        hidden_size=hidden,
        context_length=int(config.get("max_position_embeddings", 2048)),
        numbers=numbers,
    )


def _rotary(config: dict[str, Any], size: int) -> tuple[NDArray[np.float32], float]:
    """The frequencies float32 [size / 2] of rotary embeddings, and the scale of their cosines and sines."""
    context = int(config.get("max_position_embeddings", 2048))
    given = {"rope_theta": config.get("rope_theta") or 10_000.0, "original_max_position_embeddings": context}
    given |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        rope = rope_of(given, size, context)
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"config.json has {given}, which is not supported for drafters: {error}.") from error
    return rope.frequencies, rope.scale


def in_halves(
    tensors: Mapping[str, NDArray[Any]], size: int, frequencies: NDArray[np.float32], *, interleaved: bool
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """The tensors, and the frequencies float32 [size / 2], for graphs that rotate number i with number i + size / 2.

    Other orders are those of neighbours (2i with 2i + 1), and of heads of which only the first numbers are rotated. No
    product of queries and keys depends on the order of a head's numbers, so reordering both changes nothing else.

    size: numbers of a head. frequencies: float32 [n], for the first 2n of these. interleaved: neighbours are rotated.
    """
    count = len(frequencies)
    if not interleaved and 2 * count == size:
        return dict(tensors), frequencies
    rotated, rest = np.arange(2 * count), np.arange(2 * count, size)
    first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:count], rotated[count:])
    half = len(rest) // 2
    order = np.concatenate([first, rest[:half], second, rest[half:]])
    made = {
        name: values.reshape(-1, size, *values.shape[1:])[:, order].reshape(values.shape)
        if _ROTATED.search(name)
        else values
        for name, values in tensors.items()
    }
    return made, np.concatenate([frequencies, np.zeros(half, np.float32)])


def _windows(config: dict[str, Any]) -> dict[str, float]:
    """The sliding windows of a block drafter's layers."""
    kinds, window = config.get("layer_types") or (), config.get("sliding_window")
    return {f"layers.{i}.{WINDOW}": window for i, kind in enumerate(kinds) if kind == "sliding_attention" and window}


def _of_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what some take over from their main models: Qwen3's layers rotate whole heads."""
    rope = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    rope.pop("partial_rotary_factor", None)
    return config | {"rope_parameters": {"rope_theta": config.get("rope_theta") or 10_000.0} | rope}


def _in_order(
    proposed: NDArray[Any], tensors: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.int32], dict[str, NDArray[Any]]]:
    """The main ids of a drafter's logits, ascending, and the tensors with the rows of output matrices in that order.

    Raises:
        ExportError: when there is not one id for each row, or one twice.
    """
    order = np.argsort(proposed)
    made = dict(tensors)
    for name, values in tensors.items():
        if name.endswith("lm_head.weight"):
            if len(values) != len(order):
                raise ExportError(
                    f"The drafter's output matrix {name} has {len(values):,} rows, and lists {len(order):,} tokens "
                    "for them. Fetch the checkpoint again."
                )
            made[name] = values[order]
    if len(np.unique(proposed)) != len(proposed):
        raise ExportError("The drafter lists a token twice among those that it proposes. Fetch the checkpoint again.")
    return proposed[order].astype(np.int32), made


def _renamed(tensors: dict[str, NDArray[Any]], changes: dict[str, str]) -> dict[str, NDArray[Any]]:
    made = {}
    for name, values in tensors.items():
        for pattern, text in changes.items():
            name = re.sub(pattern, text, name)
        made[name] = values
    return made


_READERS: dict[str, Callable[[dict[str, Any], dict[str, NDArray[Any]], Geometry], HeadCheckpoint]] = {
    "eagle3": _eagle3,
    "mtp": _mtp,
    "dflash": _dflash,
    "dflash2": _dflash,
    "dspark": _dspark,
    "assistant": lambda config, tensors, _: HeadCheckpoint("assistant", (LAST,), **assistant.read(config, tensors)),
}
