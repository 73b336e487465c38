"""The sources of models: a hub id, a checkpoint folder or a GGUF file.

    located = fetch(locate("Qwen/Qwen2.5-0.5B-Instruct", revision=None), trust_remote_code=False, progress=progress)

A path that exists wins. A missing path is an error, never a download. Only safetensors and GGUF weights are read: other
formats are pickles, which run code when they are loaded.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError
from outrider.files import FAULTS, usable, why
from outrider_export.hub import download

if TYPE_CHECKING:
    from outrider_export.progress import Progress

CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *CHAT_TEMPLATES)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
ENCODER_DECODERS = ("T5ForConditionalGeneration", "WhisperForConditionalGeneration", "MarianMTModel")
# Models that read images, as in config.json's architectures, and have the layout of `outrider_export.vision`.
IMAGE_MODELS = ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Located:
    """A model's source, before its content is known."""

    id: str  # hub id, or the name of the folder or file, without its path
    kind: str  # "hub", "folder" or "gguf"
    path: Path | None  # None: not downloaded yet
    revision: str | None = None  # as given; after the download, the commit


def locate(name: str | Path, revision: str | None = None) -> Located:
    """Decide what `name` means, without network access.

    Raises:
        ExportError: if it is a path that does not exist.
        OptionError: if it is neither a path nor a hub id, for example too long, or a revision is given for a path.
    """
    text, path = str(name), usable(user_path(name))
    if not text.strip():
        raise OptionError("The model's name is empty. Name a .gguf file, a checkpoint folder or a hub id (org/name).")
    if path.is_dir() or path.is_file():
        if revision is not None:
            raise OptionError(f"Revision {revision!r} is for hub ids, and {text} is a path. Leave it out.")
        if path.is_dir():
            return Located(path.resolve().name, "folder", path)
        if path.suffix.lower() != ".gguf":
            raise ExportError(f"{text} is neither a checkpoint folder nor a .gguf file. Name the folder it is in.")
        return Located(path.name, "gguf", path)
    looks_like_path = isinstance(name, Path) or path.is_absolute() or text.startswith((".", "~")) or "\\" in text
    if looks_like_path or path.suffix.lower() == ".gguf" or text.count("/") > 1:
        raise ExportError(f"There is no {text}. Name a .gguf file, a checkpoint folder or a hub id (org/name).")
    if not _HUB_ID.fullmatch(text):
        raise OptionError(f"{text!r} is neither a path that exists nor a hub id. A hub id looks like org/name.")
    return Located(text, "hub", None, revision)


def default_output(main: str | Path, draft: str | Path | None = None) -> Path:
    """The default folder of a bundle: in the current folder, named after the main model.

    >>> default_output("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct").name
    'qwen2.5-coder-1.5b-instruct-pair'
    """
    source = usable(user_path(main))
    name = source.resolve().name if source.exists() else str(main).rsplit("/", 1)[-1]
    name = re.sub(r"[^a-z0-9._-]+", "-", name.lower().removesuffix(".gguf")).strip("-.") or "bundle"
    path = Path(f"{name}-pair" if draft is not None else name)
    # A checkpoint in the current folder may have that name.
    return path.with_name(f"{path.name}-bundle") if path.exists() and path.resolve() == Path(main).resolve() else path


def fetch(
    located: Located, trust_remote_code: bool, progress: Progress, only: tuple[str, ...] | None = None
) -> Located:
    """Download a hub id. Other sources are returned unchanged. only: patterns of the files to download.

    Raises:
        ExportError: if the download fails.
    """
    if located.kind != "hub":
        return located
    folder, commit = download(located.id, located.revision, trust_remote_code, progress, only)
    return replace(located, path=folder, revision=commit)


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's `config.json`, for a language model that can be exported, with unquantised weights.

    For one that reads images, the keys of its language model are among the others.

    Raises:
        ExportError: otherwise.
    """
    path = folder / "config.json"
    if not path.is_file():
        ggufs = sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"Name the file itself: {folder / ggufs[0]}." if ggufs else "Name the folder that has it."
        raise ExportError(f"{folder} is not a checkpoint: it has no config.json. {hint}")
    config = read_json(path)
    architectures = config.get("architectures") or []
    reads_images = any(name in IMAGE_MODELS for name in architectures)
    if reads_images:
        config |= config.get("text_config") or {}
    elif "vision_config" in config and not any("CausalLM" in name for name in architectures):
        raise ExportError(
            f"{folder} holds a {(architectures or ['model'])[0]}, whose images are laid out in another way than those "
            f"of {IMAGE_MODELS[0]} and {IMAGE_MODELS[1]}: of models that read images, Outrider runs these two."
        )
    known = "CausalLM", "LMHead", *ENCODER_DECODERS
    if architectures and not reads_images and not any(part in name for name in architectures for part in known):
        raise ExportError(
            f"{folder} holds a {architectures[0]}; Outrider runs causal language models (…ForCausalLM) and "
            f"{', '.join(ENCODER_DECODERS)}."
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
        raise ExportError(f"{folder} is quantised already ({method}). Export the original checkpoint or a GGUF file.")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file.

    Raises:
        ExportError: if the file exists and is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except FAULTS as error:
        raise ExportError(f"{path} cannot be read: {why(error)}.") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} holds no JSON object.")
    return content


def count_weights(folder: Path) -> int:
    """The number of weights in a checkpoint's safetensors files, from their headers.

    Raises:
        ExportError: if there are none, one that the index names is missing, or one is cut short.
    """
    index = read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        if pickles:
            raise ExportError(
                f"{folder} has its weights as pickles only ({pickles[0]}), which run code when they are loaded. Look "
                "for the same model with safetensors, or save it anew with save_pretrained where you trust it."
            )
        raise ExportError(f"{folder} has no *.safetensors. Download the checkpoint again, with its weights.")
    return sum(_safetensors_weights(folder / name) for name in names)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, `size` bytes from `begin` on. kind: as the file names it, such as "F32"."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int

    def read(self) -> bytes:
        """Its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.size)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors in a checkpoint's safetensors files, by name. Call `count_weights` first: it checks the files."""
    index = read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    found = {}
    for path in (folder / name for name in names):
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                found[name] = Tensor(path, tensor["dtype"], tuple(tensor["shape"]), 8 + length + begin, end - begin)
    return found


def _safetensors_weights(path: Path) -> int:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > size - 8:
                raise ValueError("its header goes on past its end")
            tensors = {k: v for k, v in json.loads(file.read(length)).items() if k != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if 8 + length + end > size:
            raise ValueError(f"it has {size:,} bytes of {8 + length + end:,}")
        return sum(prod(tensor["shape"]) for tensor in tensors.values())
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ExportError(f"{path} is missing or damaged: {error}. Download the checkpoint again.") from error
