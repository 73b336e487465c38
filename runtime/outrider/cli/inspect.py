"""`outrider inspect`."""

import itertools
from collections import Counter
from pathlib import Path

import click
import msgspec
from rich.filesize import decimal

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import DrafterEntry, EncoderEntry, Geometry, ModelEntry, TextEncoderEntry, describe_layers
from outrider.cli.console import out, print_json, table
from outrider.cli.export import Bars
from outrider.cli.opening import model_argument, open_model
from outrider.cli.options import json_option
from outrider.cli.parts import is_unknown_architecture, print_parts
from outrider.config.files import user_path
from outrider.engine.opening import is_gguf
from outrider.errors import ExportError, OptionError, needs
from outrider.system.files import usable


@click.command()
@model_argument
@click.option("--check", is_flag=True, help="Read every file and compare its sha256 with the manifest.")
@json_option
def inspect(bundle: str, draft: str | None, check: bool, as_json: bool) -> None:
    """Print what is inside MODEL.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id. Of a .gguf file that is no bundle yet the header
    is read, and nothing is converted. Of a config.json, and of a checkpoint whose architecture Outrider does not know,
    print which of its parts are known, and what is missing.
    """
    path = usable(user_path(bundle))
    if is_gguf(path):
        for option, value in {"check": check, "draft": draft}.items():
            if value:
                raise OptionError(f"--{option} is for bundles, and of {bundle} the header is read. Leave it out.")
        _inspect_file(path, as_json=as_json)
        return
    if is_unknown_architecture(path):
        print_parts(path, draft=draft, check=check, as_json=as_json)
        return
    opened = open_model(bundle, draft, quiet=as_json)
    if check:
        check_files(opened, quiet=as_json)
    if as_json:
        print_json({"bundle": str(opened.folder), "checked": check, **msgspec.to_builtins(opened.manifest)})
        return
    _print(opened)
    if check:
        out.print(f"All {len(opened.manifest.files)} files have the sha256 of the manifest.", style="green")


def _inspect_file(path: Path, *, as_json: bool) -> None:
    """Describe a GGUF file by its header."""
    with needs(f"{path} is read by the export half of outrider, which is not installed", "cli", ExportError):
        from outrider_export.describe.describe_file import describe_gguf
    found = describe_gguf(path)
    if as_json:
        print_json(found)
        return
    parts = f" in {found['files']} files" if found["files"] > 1 else ""
    layers = f"{found['layers']} layers, {found['weights'] / 1e6:,.0f} million weights"
    tensors = ", ".join(f"{count} {kind}" for kind, count in found["tensors"].items())
    rows = {
        "name": found["name"],
        "license": found["license"],
        "architecture": f"{found['architecture']}, {layers}",
        "MTP layers": str(found["mtp_layers"] or ""),
        "quantization": f"{found['quantization']} ({tensors})",
        "longest context": f"{found['context_length']:,} tokens" if found["context_length"] else None,
        "tokenizer": " ".join(filter(None, (found["tokenizer"], found["pre_tokenizer"]))),
        "chat template": "yes" if found["chat_template"] else "no",
    }
    if "refused" in found:
        rows["becomes"] = f"nothing: {found['refused']}"
    else:
        needed = found["needs_pytorch_for"]
        rows |= {
            "vocabulary": f"{found['vocabulary']:,} tokens",
            "answers end with": " ".join(found["ends_with"]) or "none",
            "becomes": f"{found['becomes']}, about {decimal(found['becomes_bytes'])}, "
            + (f"with PyTorch, as it has {needed}" if needed else "without PyTorch"),
        }
    out.print(f"{found['file']}", style="bold", soft_wrap=True)
    out.print(f"{decimal(found['bytes'])}{parts}; nothing was converted\n")
    made = table("", "", text=2)
    for name, value in rows.items():
        if value:
            made.add_row(name, value)
    out.print(made)


def check_files(bundle: Bundle, *, quiet: bool) -> None:
    """Compare the sha256 of every file with the manifest. Raises as `Bundle.check_hashes`."""
    with Bars(quiet=quiet) as bars:
        bars.phase("checking", bundle.manifest.size)
        bundle.check_hashes(bars.advance)


def _print(bundle: Bundle) -> None:
    manifest = bundle.manifest
    models = {"main": manifest.main} | {drafter.name: drafter.model for drafter in manifest.drafters}
    out.print(f"{bundle.folder}", style="bold", soft_wrap=True)
    out.print(
        f"{decimal(manifest.size)} in {len(manifest.files)} files, made by {manifest.created_by}, for outrider "
        f"{manifest.minimum_runtime} or later\n"
    )
    described = {name: _describe(model) for name, model in models.items()}
    for drafter in manifest.drafters:
        described[drafter.name]["drafts by"] = _way(drafter, manifest.main)
        if drafter.model.encoder and manifest.main.encoder:
            is_shared = drafter.model.encoder.folder == manifest.main.encoder.folder
            described[drafter.name]["encoder"] = "the main model's" if is_shared else _encoder(drafter.model.encoder)
    _print_models(described)
    for adapter in manifest.adapters:
        targets = ", ".join(target.split(".")[-1] for target in adapter.targets)
        out.print(f"\nadapter {adapter.name}", style="bold")
        out.print(f"{adapter.source.id}; rank {adapter.rank} in {targets}")
    tokenizer = manifest.tokenizer
    eos = " or ".join(str(token_id) for token_id in tokenizer.eos_token_ids) or "none"
    out.print("\ntokenizer", style="bold")
    template = "with" if tokenizer.chat_template else "without"
    out.print(
        f"{template} a chat template; answers end with token {eos}; a text begins with "
        f"{_or_none(tokenizer.bos_token_id)}; padding {_or_none(tokenizer.pad_token_id)}; "
        f"{len(tokenizer.special_token_ids)} special tokens\n"
    )
    files = table("file", "size", "sha256")
    for file in manifest.files:
        files.add_row(file.path, decimal(file.size), f"{file.sha256[:16]}…")
    out.print(files)


def _describe(model: ModelEntry) -> dict[str, str]:
    geometry, source = model.geometry, model.source
    long = f", rotated otherwise from {geometry.long_from:,} on" if geometry.long_from else ""
    return {
        "made from": source.id,
        "revision": source.revision or "-",
        "architecture": geometry.architecture,
        "weights": model.weights,
        "format": model.format,
        "longest context": f"{geometry.context_length:,} tokens{long}",
        "vocabulary": _vocabulary(model),
        "layers": f"{geometry.num_layers}, {_states(geometry)}hidden size {geometry.hidden_size:,}",
        "attention heads": _heads(geometry),
        "sliding window": _windows(geometry),
        "experts": f"{geometry.num_experts}, {geometry.num_active_experts} per token" if geometry.num_experts else "-",
        **({"encoder": _encoder(model.encoder)} if model.encoder else {}),
        **_images(model),
        **({"makes": _made_by(model.text_encoder)} if model.text_encoder else {}),
        **{_RECIPE[name]: _ROUTES.get(value, value) for name, value in source.recipe.items() if name in _RECIPE},
        "made with": ", ".join(f"{name} {value}" for name, value in source.recipe.items() if name not in _RECIPE)
        or "-",
    }


# What manifests call what an export did, and what users read.
_RECIPE = {
    "route": "conversion",
    "tied_embeddings": "tied embeddings",
    "file": "file",
    "adapter": "adapter",
    "adapter_sha256": "adapter sha256",
}  # all else are packages and their versions
_ROUTES = {
    "import": "none: an OpenVINO or ONNX model as it was",
    "drafter": "of a published drafter",
    "true": "yes",
    "false": "no",
}


def _vocabulary(model: ModelEntry) -> str:
    width = model.geometry.logits_width  # less than the vocabulary where a drafter's output matrix was cut
    return f"{model.vocab_size:,} tokens" + (f", padded to {width:,}" if width > model.vocab_size else "")


def _states(geometry: Geometry) -> str:
    num_states = len(geometry.layer_states) - geometry.layer_states.count("")
    return f"{num_states} of them with a state, " if num_states else ""


def _heads(geometry: Geometry) -> str:
    if not geometry.kv_shapes:
        values = f", of values {geometry.value_size}" if geometry.value_size else ""
        return f"{geometry.num_heads}, with {geometry.num_kv_heads} key-value heads, size {geometry.head_size}{values}"
    shapes = Counter(geometry.cache_shapes)
    own = " and ".join(f"{heads}, size {size} ({count} layers)" for (heads, size), count in sorted(shapes.items()))
    others = len(geometry.kv_shapes) - shapes.total()
    shared = f"; {others} layers read the keys and values of others" if others else ""
    return f"{geometry.num_heads}, with key-value heads: {own}{shared}"


def _windows(geometry: Geometry) -> str:
    if geometry.sliding_windows is None:
        return "not known"
    from outrider.models.backends.attention import describe_windows

    return describe_windows(geometry.sliding_windows) if any(geometry.sliding_windows) else "-"


def _encoder(encoder: EncoderEntry) -> str:
    what = f"{encoder.num_layers} layers of {encoder.hidden_size:,}, in {encoder.folder}/, reads "
    audio = encoder.audio
    if audio is None:
        return f"{what}up to {encoder.context_length:,} tokens"
    return f"{what}{audio.chunk_seconds} s of audio at {audio.sampling_rate:,} Hz, {audio.num_mel_bins} mel bins"


def _made_by(encoder: TextEncoderEntry) -> str:
    if encoder.kind == "rerank":
        return "the relevance of texts for a query"
    return f"embeddings, pooled by {(encoder.pooling or 'cls').replace('_', ' ')}"


def _images(model: ModelEntry) -> dict[str, str]:
    """How it sees images; nothing for a model of text."""
    vision = model.vision
    if vision is None:
        return {}
    from outrider.inputs.vision.tiles import PROCESSORS

    return {"images": f"{PROCESSORS[vision.layout].described(vision)}, {vision.weights}"}


def _way(drafter: DrafterEntry, main: ModelEntry) -> str:
    if drafter.layers:
        return f"layers {describe_layers(drafter.layers)} of the main model"
    way = "the same vocabulary"
    if drafter.vocabulary != "same":
        shared = drafter.num_shared_tokens or 0
        way = f"{drafter.vocabulary}: {shared:,} shared tokens, {shared / main.vocab_size:.1%} of the main model's"
    if drafter.num_proposed_tokens:
        way += f"; proposes {drafter.num_proposed_tokens:,} of its tokens"
    return way


def _print_models(models: dict[str, dict[str, str]]) -> None:
    """Side by side where the terminal is wide enough, else one below the other. "-" stands for nothing."""
    keys = dict.fromkeys(itertools.chain(*models.values()))
    said = [key for key in keys if any(described.get(key, "-") != "-" for described in models.values())]
    made = table("", *said, text=len(said))
    for name, described in models.items():
        made.add_row(f"{name} model" if name == "main" else name, *(described.get(key, "-") for key in said))
    out.print(made)


def _or_none(token_id: int | None) -> str:
    return "none" if token_id is None else str(token_id)
