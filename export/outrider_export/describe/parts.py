"""What is known of an architecture that has no entry in `direct.archs`, from its config.json and its tensors' names.

    report = report_of(path)        # a config.json, or a checkpoint folder
    report.parts                    # what the configuration says of each part, and whether the table has it
    report.unread                   # keys of the configuration that no entry reads

`outrider inspect CONFIG.json` prints it; docs/new-architecture.md says what to do with it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outrider.bundle.architectures import REFUSED
from outrider.errors import ExportError
from outrider_export.direct.arch import Arch, NotDirect
from outrider_export.direct.archs import ARCHS
from outrider_export.direct.describe import ACTIVATIONS, describe_as, settled
from outrider_export.direct.latent import KV_A, KV_B, KV_NORM, QUERIES
from outrider_export.direct.rope import rope_of
from outrider_export.direct.states import STATES
from outrider_export.extras import has_pytorch
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import architectures_of, configuring, name_in_text, read_json, text_part

_FIRST = "llama"  # the entry that a new one is compared with, if no name is like its own
_KEYS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_HARMLESS = re.compile("|".join(_KEYS["harmless"]))
_PARTS_OF_LAYER = re.compile(r"^model\.layers\.\d+\.(.+?)\.?(weight|bias)?$")
_TEXT_ALONE = "Its text part has an entry; its images are laid out in a way that Outrider does not know."
_EXPERT = re.compile(r"experts\.\d+\.")


@dataclass(frozen=True)
class DecoderPart:
    """A part of a decoder. says: what the configuration has of it. known: whether entries can have that."""

    name: str
    says: str
    known: bool


@dataclass(frozen=True)
class Report:
    """architecture: its `model_type`. like: the entry to begin with. obstacle: the first thing that `describe` refuses
    when it reads the configuration by that entry; "" if it reads all. elsewhere: keys that this entry does not read and
    another one does, which is named; unread: that none does. tensors: of layers, that this entry has not. refused: why
    the architecture does not run; "" if nothing is against it. of_images: whether it is the text part of a model whose
    images are laid out in a way that is not known.
    """

    architecture: str
    has_entry: bool
    like: str
    parts: tuple[DecoderPart, ...]
    elsewhere: Mapping[str, str]
    unread: tuple[str, ...]
    obstacle: str
    tensors: tuple[str, ...]
    refused: str
    of_images: bool = False

    @property
    def missing(self) -> list[DecoderPart]:
        """The parts that need more than an entry."""
        return [part for part in self.parts if not part.known]

    @property
    def verdict(self) -> str:
        """What the entry takes, in a sentence."""
        if self.has_entry and not self.obstacle:
            return _TEXT_ALONE if self.of_images else "It has an entry."
        if self.missing:
            return f"More than an entry: {', '.join(part.name for part in self.missing)} has to be built first."
        counts = {
            "names of tensors": len(self.tensors), "keys that other entries read": len(self.elsewhere),
            "keys to look up": len(self.unread),
        }  # fmt: skip
        what = [f"{count} {name}" for name, count in counts.items() if count]
        what += [f"a way round '{self.obstacle}'"] if self.obstacle else []
        return f"It needs an entry with {', '.join(what)}." if what else "It needs an entry of one line."


class _Asked(dict[str, Any]):
    """A configuration that records which keys are asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.keys_asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: Any) -> Any:
        made = _Asked({**self, **other})
        made.keys_asked = self.keys_asked
        return made


def has_no_entry(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a decoder that no list here has, and nothing else may convert it."""
    from outrider_export.describe.architectures import ARCHITECTURES

    try:
        config = text_part(read_json(folder / "config.json"))
    except (ExportError, LookupError, TypeError, AttributeError):
        return False  # an export says what is wrong
    names, name = architectures_of(config), str(config.get("model_type", ""))
    is_decoder = bool(name and names) and all(each.endswith("ForCausalLM") for each in names)
    return is_decoder and name not in {*ARCHS, *ARCHITECTURES, *REFUSED} and not has_pytorch()


def report_of(path: Path) -> Report:
    """What is known of the architecture of a config.json, or of a checkpoint folder.

    Raises:
        ExportError: when there is none, or it is damaged.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ExportError(f"There is no {file}. Name a config.json, or a checkpoint folder that has one.")
    with configuring(file):
        config = text_part(read_json(file))
        of_images = "hidden_size" not in config and isinstance(config.get("text_config"), dict)
        config = config["text_config"] if of_images else config
        config = {key: value for key, value in config.items() if value is not None}
        name = str(config.get("model_type") or "")
        if not name:
            raise ExportError(f"{file} has no model_type, so it is no decoder's configuration.")
        arch = ARCHS[name] if name in ARCHS else _like(name)
        asked = _Asked(settled(arch, config))
        obstacle = ""
        try:
            describe_as(arch, asked)
        except NotDirect as error:
            obstacle = str(error)
        left = sorted({*config} - asked.keys_asked - {*_asked_by(arch.name), *_KEYS["always"]})
        left = [key for key in left if not _HARMLESS.fullmatch(key)]
        readers = {key: other for other in reversed(ARCHS) for key in _asked_by(other)}
        elsewhere = {key: readers[key] for key in left if key in readers}
        unread = [key for key in left if key not in elsewhere]
        parts = tuple(_parts(config, arch))
        tensors = tuple(_unknown_tensors(file.parent, arch)) if any(file.parent.glob("*.safetensors")) else ()
        return Report(
            name, name in ARCHS, arch.name, parts, elsewhere, tuple(unread), obstacle, tensors, REFUSED.get(name, ""),
            of_images,
        )  # fmt: skip


def _like(name: str) -> Arch:
    """The entry whose name is most like this one."""
    bare = {known.removesuffix("_text"): known for known in ARCHS}
    near = get_close_matches(name.removesuffix("_text"), bare, n=1, cutoff=0.7)
    return ARCHS[bare[near[0]] if near else _FIRST]


@functools.cache
def _asked_by(name: str) -> frozenset[str]:
    """The keys that an entry reads."""
    arch = ARCHS[name]
    minimal = _KEYS["minimal"] | (_KEYS["minimal_experts"] if arch.experts.router else {})
    if arch.layers == "blocks":
        minimal |= {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    elif arch.varied or arch.attention.windows == "named":
        minimal |= {"layer_types": ["full_attention"] * 4}
    config = _Asked(settled(arch, minimal))
    with contextlib.suppress(NotDirect):
        describe_as(arch, config)
    return frozenset({*config.keys_asked, *arch.keys.values()})


def _parts(config: Mapping[str, Any], arch: Arch) -> Iterator[DecoderPart]:
    """What a configuration says of each part of a decoder."""
    lacking = {
        key: next((name for name in names if name in config), "")
        for key, names in _KEYS["synonyms"].items()
        if key not in config and key not in arch.keys
    }
    if lacking.get("intermediate_size") == "" and "moe_intermediate_size" in config:  # all layers have experts
        lacking["intermediate_size"] = "moe_intermediate_size"
    said = [f"{key} {config[key]}" for key in _KEYS["synonyms"] if key in config]
    said += [f"no {key}" + (f", but {other}: map it in `keys`" if other else "") for key, other in lacking.items()]
    yield DecoderPart("sizes", ", ".join(said), all(lacking.values()))
    eps = next((key for key in ("rms_norm_eps", "norm_eps") if key in config), "")
    if eps:
        yield DecoderPart("norm", f"root mean square ({eps})", True)
    else:
        is_layer = any("layer_norm" in key for key in config)
        yield DecoderPart(
            "norm", 'mean and variance (`norms.kind = "layer"`)' if is_layer else "no eps of a norm", is_layer
        )
    yield _rotation(config)
    yield _attention(config)
    yield from _layers(config, arch)
    keys = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
    activation = next((str(config[key]) for key in keys if config.get(key)), "")
    yield DecoderPart("activation", activation or "none named, so silu", activation in ("", *ACTIVATIONS))
    yield from _experts(config)
    if factors := ", ".join(key for key in _KEYS["multipliers"] if key in config):
        yield DecoderPart("multipliers and caps", factors, True)
    for key, what in _KEYS["missing"].items():
        if key == "attention_chunk_size" and arch.attention.chunked:
            yield DecoderPart(what, f"the context ends with the first one ({config.get(key, 'none')})", True)
        elif config.get(key) and config[key] != 1:
            yield DecoderPart(what, f"{key} is {config[key]}", False)


def _rotation(config: Mapping[str, Any]) -> DecoderPart:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = [each for each in given.values() if isinstance(each, dict)] or [given]
    whole = {"rope_theta": config.get("rope_theta", 1e4), "original_max_position_embeddings": 512}
    kinds = [str(each.get("rope_type") or each.get("type") or "default") for each in by_kind]
    partial = f", {config['partial_rotary_factor']} of a head" if "partial_rotary_factor" in config else ""
    not_all = [key for key in ("no_rope_layers", "no_rope_layer_interval", "layer_rope_theta") if config.get(key)]
    said = " and ".join(dict.fromkeys(kinds)) + partial + (f", not in all layers ({not_all[0]})" if not_all else "")
    try:
        for each in by_kind:
            rope_of(whole | each, 64, int(config.get("max_position_embeddings", 512)))
    except (KeyError, ValueError, TypeError) as error:
        return DecoderPart("rotation", f"{said}: {error}", False)
    return DecoderPart("rotation", said, True)


def _attention(config: Mapping[str, Any]) -> DecoderPart:
    heads = config.get("num_attention_heads", "?")
    shared = config.get("num_key_value_heads", heads)
    size = f" of {config['head_dim']} numbers" if config.get("head_dim") else ""
    cap = ", cap of scores (left out, as in Transformers' default)" if config.get("attn_logit_softcapping") else ""
    return DecoderPart("attention", f"{heads} heads{size}, {shared} of keys and values{cap}", True)


def _layers(config: Mapping[str, Any], arch: Arch) -> Iterator[DecoderPart]:
    kinds = config.get("layer_types") or []
    counted = {str(kind): kinds.count(kind) for kind in kinds} if isinstance(kinds, list) else {}
    window = config.get("sliding_window")
    known = ("full_attention", "attention", "sliding_attention", *STATES)
    known += ("chunked_attention",) if arch.attention.chunked else ()
    if counted:
        said = ", ".join(f"{count} {kind}" for kind, count in counted.items())
        said += f", window {window}" if window and "sliding_attention" in counted else ""
        yield DecoderPart("layers", said, all(kind in known for kind in counted))
    elif window:
        yield DecoderPart("layers", f"window {window}; which layers have it is for `windows` to say", True)


def _experts(config: Mapping[str, Any]) -> Iterator[DecoderPart]:
    key = next((key for key in _KEYS["experts"] if config.get(key) and config[key] != 1), None)
    if key is None:
        return
    router = config.get("scoring_func") or "softmax or sigmoid, as the modelling code says"
    said = f"{config[key]} ({key}), router: {router}"
    yield DecoderPart("experts", said, str(router) in ("softmax", "sigmoid") or "as the" in str(router))


def _unknown_tensors(folder: Path, arch: Arch) -> Iterator[str]:
    """The names of layers' tensors that an entry does not know, without the layer's number."""
    norms = {arch.norms.before_attention, arch.norms.after_attention, arch.norms.before_mlp, arch.norms.after_mlp}
    known = {
        *norms, *arch.names.values(), *(f"self_attn.{name}" for name in ("q_norm", "k_norm", "rotary_emb.inv_freq")),
        *(f"self_attn.{name}_proj" for name in (("qkv", "o") if arch.matrices.fused else ("q", "k", "v", "o"))),
        *(f"mlp.{name}_proj" for name in (("gate_up", "down") if arch.matrices.fused_mlp else ("gate", "up", "down"))),
        *((*QUERIES, KV_A, KV_NORM, KV_B) if arch.attention.latent else ()),
    }  # fmt: skip
    seen: dict[str, None] = {}
    for name in tensors_of(folder):
        if found := _PARTS_OF_LAYER.match(name_in_text(name)):
            seen.setdefault(_EXPERT.sub("experts.{}.", found[1]))
    states = ("conv", "linear_attn", "mamba")
    return (name for name in seen if name not in known and not name.startswith(tuple(f"{each}." for each in states)))
