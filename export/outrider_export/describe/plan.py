"""Plans the conversion of each model, from headers and configurations, before any work begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from outrider.bundle.manifest import EncoderEntry, Format, Geometry
from outrider.bundle.vision import AnyVisionEntry
from outrider.errors import ExportError, OptionError, nearest
from outrider_export import extras
from outrider_export.describe.architectures import ARCHITECTURES
from outrider_export.describe.encoder_decoder import (
    describe_encoder,
    geometry_of,
    kind_of_encoder_decoder,
    vocabulary_of,
)
from outrider_export.describe.geometry import check_architecture, geometry_of_config, geometry_of_gguf
from outrider_export.describe.vision import vision_of
from outrider_export.direct.arch import NotDirect
from outrider_export.direct.decoder import Decoder
from outrider_export.direct.describe import describe
from outrider_export.direct.gguf_config import decoder_of
from outrider_export.extras import check_extra
from outrider_export.progress import Silent
from outrider_export.sources.gguf_drafter import kind_of_file
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.sources.gguf_holes import check_holes
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.safetensors import count_weights
from outrider_export.sources.source import (
    IMAGE_MODELS,
    UNQUANTISED,
    Located,
    architectures_of,
    configuring,
    fetch,
    read_config,
    read_json,
    text_part,
)
from outrider_export.tokenizers.vocabulary import Vocabulary

# GGUF files are converted, too: a target pass takes 276 ms in Q4_K_M against 123 in int8 (Intel
# Xeon), and more for every draft token. A draft model has to be fast rather than right: in 4 bits, the 0.5B of the
# Qwen2.5-Coder pair drafts in 11 ms per token instead of 15, and 83 % instead of 85 % of its first tokens are accepted.
# A small one is not faster in 4 bits, and loses more: SmolLM2-135M takes 7.8 ms either way, with 0.25 nats of KL
# divergence in its slice where int8 has 0.007.
DEFAULT_WEIGHTS = {"main": "int8", "draft": "int4", "small draft": "int8"}
SMALL_DRAFT = 200_000_000  # weights


# In ONNX a model computes in float32, and GGUF's blocks are unknown. It is converted without PyTorch, or not at all.
WEIGHTS: dict[str, tuple[str, ...]] = {
    "openvino": ("int8", "int4", "fp16", "fp32"),
    "onnx": ("int8", "int4", "fp32"),
}
_Entry = TypeVar("_Entry")
# Bytes per weight in the bundle, with scales; and in the temporary uncompressed model.
_BYTES = {
    "openvino": {"int8": 1.05, "int4": 0.8, "fp16": 2.0, "fp32": 4.0},
    "onnx": {"int8": 1.15, "int4": 0.9, "fp32": 4.0},
}
_SCRATCH_BYTES = {"int8": 4.0, "int4": 4.0, "fp16": 0.0, "fp32": 0.0}  # through PyTorch
TOKENIZER_BYTES = 40_000_000
PARALLEL_PLACES = 8  # tokens that one call of a draft model with `parallel_mask` drafts, as in its training


@dataclass(frozen=True)
class Plan:
    """One model: what it is, and how it is converted."""

    role: str  # "main" or "draft"
    source: Located
    path: Path
    format: Format
    weights: str  # "int8", "int4", "fp16" or "fp32"
    geometry: Geometry
    vocabulary: Vocabulary
    header: GGUFHeader | None  # of a GGUF file
    config: dict[str, Any]  # of a checkpoint; empty for a GGUF file
    num_weights: int
    encoder: EncoderEntry | None = None  # of an encoder-decoder model
    vision: AnyVisionEntry | None = None  # of a main model that reads images
    direct: bool = False  # converted without PyTorch; see `outrider_export.direct`
    chosen: str = ""  # why it has this form, where nobody asked for one; see `outrider_export.weights_choice.choice`

    @property
    def final_bytes(self) -> int:
        """Estimated bytes of the model in the bundle."""
        return int(self.num_weights * _BYTES[self.format][self.weights])

    @property
    def scratch_bytes(self) -> int:
        """Estimated bytes of temporary files during the conversion."""
        if self.direct:
            return 0
        # Of a decoder with an encoder there are two graphs, both in float32.
        per_weight = 8.0 if self.encoder else _SCRATCH_BYTES[self.weights]
        return int(self.num_weights * per_weight)


def default_weights(role: str, num_weights: int) -> str:
    """The format of a model's weights if nobody says. role: "main" or "draft"."""
    return DEFAULT_WEIGHTS["small draft" if role == "draft" and num_weights < SMALL_DRAFT else role]


def check_format(option: str, format: str) -> Format:  # noqa: A002 - the option's name
    """Check a model format.

    Raises:
        OptionError: with the nearest known one.
    """
    if format not in WEIGHTS:
        raise OptionError(f"{option}={format!r} is not a model format. {nearest(format, WEIGHTS)}")
    return cast("Format", format)


def check_weights(option: str, weights: str | None, format: str) -> None:  # noqa: A002
    """Check a weight format for a model format.

    Raises:
        OptionError: with the nearest known one, or all.
    """
    if weights is None or weights in WEIGHTS[format]:
        return
    if weights not in WEIGHTS["openvino"]:
        raise OptionError(f"{option}={weights!r} is not a weight format. {nearest(weights, WEIGHTS[format])}")
    raise OptionError(
        f"{option}={weights!r} is not for ONNX: models in ONNX compute in float32 on a processor, and would have to "
        "widen their weights first. Choose int8, int4 or fp32."
    )


def check_route(source: Located, format: Format, *, trust_remote_code: bool = False) -> None:  # noqa: A002
    """Check, before the download of its weights, that `source` can be converted with these options.

    A GGUF file of the hub is checked when it is there.

    Raises:
        ExportError: if Outrider does not run such a model; or if packages are missing, with the command that installs
            them, and the way without them.
    """
    if (found := _describe_source(source)) is None:
        return
    header, config = found
    if format == "onnx":
        check_extra(f"Exporting {source.id} to ONNX", format)
    elif not extras.missing(format):
        return
    obstacle = why_not_direct(source.id, header, config, trust_remote_code=trust_remote_code)
    if obstacle is None and format == "onnx":
        obstacle = why_not_onnx(describe(config) if header is None else decoder_of(header))
    if obstacle is None:
        return
    if format == "onnx":
        raise ExportError(
            f"{source.id} has {obstacle}, which is not converted to ONNX. Leave out --format onnx to have it run by "
            "OpenVINO."
        )
    is_tried = (
        header
        or kind_of_encoder_decoder(config)
        or {*architectures_of(config)} & {*IMAGE_MODELS}
        or config.get("model_type") in ARCHITECTURES
    )
    untried = "" if is_tried else "; the model is none of docs/models.md, so that it may be refused all the same"
    check_extra(f"Exporting {source.id}, which has {obstacle},", format, untried)


def _describe_source(source: Located) -> tuple[GGUFHeader | None, dict[str, Any]] | None:
    """A GGUF file's header, or a checkpoint's configuration, of a model that some packages run.

    None for a repository on the hub that may be of GGUF files.

    Raises:
        ExportError: if no package helps.
    """
    header = read_header(source.fetched) if source.kind == "gguf" else None
    if header is not None and (kind := kind_of_file(source.fetched)) is not None:
        raise ExportError(
            f"{source.id} has a drafter of the kind {kind}, and no model that writes by itself. Export the main model "
            f"that it was trained for, and add it: outrider add BUNDLE {source.id}"
        )
    if header is not None:
        check_architecture({"model_type": header.architecture}, Path(source.id))
        return header, {}
    path = fetch_config(source).fetched / "config.json"
    if source.kind == "hub" and (":" in source.id or not path.is_file()):  # see `fetch`
        return None
    read_config(path.parent, source.id)
    with configuring(path):
        config = text_part(read_json(path))
    check_architecture(config, Path(source.id))
    return None, config


def fetch_config(source: Located) -> Located:
    """A checkpoint's folder with its configuration, which is all that is downloaded."""
    return fetch(source, False, Silent(), ("config.json",))


def why_not_direct(
    where: str, header: GGUFHeader | None, config: dict[str, Any], *, trust_remote_code: bool
) -> str | None:
    """What a model has that only PyTorch converts, such as "the architecture 'bloom'"; None if there is nothing.

    where: its name. header: of a GGUF file; config: of a checkpoint.

    Raises:
        ExportError: when a value of its configuration is not what it has to be.
    """
    if trust_remote_code and "auto_map" in config:
        return "Python code of its own"
    names = architectures_of(config)
    if not all(name.endswith("ForCausalLM") for name in names):
        return f"the architecture {names[0]!r}"
    try:
        with configuring(where):
            if header is None:
                describe(config)
            else:
                decoder_of(header)
    except NotDirect as error:
        return str(error)
    return None


def why_not_onnx(decoder: Decoder) -> str | None:
    """What a model that is converted without PyTorch has that its graph in ONNX has not; None if there is nothing."""
    if decoder.states:
        return "layers with a state that every token changes"
    if decoder.arch.attention.normed_after_rope:
        return "norms between rotation and attention"
    if decoder.query_growth is not None:
        return "queries that grow with their position"
    if decoder.arch.attention.gate in ("matrix", "heads"):
        return "gates after attention"
    if decoder.latent is not None:
        return "latent attention"
    if decoder.arch.ungated:
        return "feed-forward parts without a gate"
    return "mixtures of experts" if decoder.experts else None


def make_plan(
    role: str,
    source: Located,
    format: Format,  # noqa: A002 - the option's name
    weights: str | None,
    *,
    trust_remote_code: bool = False,
) -> Plan:
    """Plan the conversion of a model that has passed `check_route`.

    Raises:
        ExportError: if it is damaged, or cannot be exported.
    """
    path = source.fetched
    vision: AnyVisionEntry | None = None
    if source.kind == "gguf":
        header = read_header(path)
        check_holes(header)
        with configuring(path):
            vocabulary, geometry = Vocabulary.of_gguf(header), _checked(geometry_of_gguf(header))
        num_weights = sum(tensor.num_weights for tensor in header.tensors.values())
        weights = weights or default_weights(role, num_weights)
        config: dict[str, Any] = {}
        encoder = None
    else:
        with configuring(path):
            config, num_weights = read_config(path), count_weights(path)
            weights = weights or default_weights(role, num_weights)
            vocabulary, header, encoder = vocabulary_of(path, config), None, None
            if kind_of_encoder_decoder(config) is not None:
                geometry = _checked(geometry_of(config, path))
                encoder = _checked(describe_encoder(path, config, vocabulary))
            else:
                geometry = geometry_of_config(config, path)
                # Of draft models and in ONNX, the text part alone, where there is one.
                is_text = (role, format) != ("main", "openvino")
                vision = _checked(vision_of(path, weights, vocabulary, whole_only=is_text))
    if vision is not None and role != "main":
        raise ExportError(
            f"{source.id} reads images, and the draft model reads text only. Name a model of text with --draft."
        )
    direct = vision is None or vision.layout not in IMAGE_MODELS.values()
    direct = direct and why_not_direct(source.id, header, config, trust_remote_code=trust_remote_code) is None
    if not direct and config.get("quantization_config"):
        raise ExportError(
            f"{source.id} is quantised already, and is not converted without PyTorch, which reads FP8. {UNQUANTISED}"
        )
    plan = Plan(
        role, source, path, format, weights, geometry, vocabulary, header, config, num_weights, encoder, vision, direct
    )
    check_width(plan)
    return plan


def _checked(entry: _Entry) -> _Entry:
    """An entry of the manifest, if its fields have the values that they may have there.

    Raises:
        msgspec.ValidationError: otherwise.
    """
    return msgspec.convert(msgspec.to_builtins(entry), type(entry))


def check_width(plan: Plan) -> None:
    """Check that the output matrix has a row for each token.

    Raises:
        ExportError: with both numbers.
    """
    if len(plan.vocabulary) > plan.geometry.logits_width:
        raise ExportError(
            f"{plan.source.id} has {len(plan.vocabulary):,} tokens and an output matrix for "
            f"{plan.geometry.logits_width:,}: tokenizer and weights do not belong together."
        )


def parallel_mask(plan: Plan) -> int | None:
    """The token that stands for tokens to draft, in a draft model that drafts them all in one call; None in others.

    Source: config.json of AMD's PARD models, `pard_token`.
    """
    mask = plan.config.get("pard_token")
    return mask if isinstance(mask, int) and 0 <= mask < plan.geometry.logits_width else None


def space_needed(plans: list[Plan]) -> int:
    """The most bytes that the export takes on the target's disk."""
    return sum(plan.final_bytes for plan in plans) + max(plan.scratch_bytes for plan in plans) + TOKENIZER_BYTES
