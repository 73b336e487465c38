"""The sources of models: a hub id, a checkpoint folder or a GGUF file.

A path that exists wins. A missing path is an error, never a download. Only safetensors and GGUF weights are read: other
formats are pickles, which run code when they are loaded.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outrider.bundle.vision import ImageLayout
from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError, OutriderError, install, is_installed
from outrider.inputs.text.chat_template import TEMPLATE_FILE, TEMPLATE_FOLDER, ChatTemplates
from outrider.system.files import FAULTS, as_text, usable, why
from outrider_export.progress import Progress
from outrider_export.sources.gguf_shards import SUFFIX, models_in, shards_of, whole_name
from outrider_export.sources.hub import download, download_gguf

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE, "chat_template.json"
)  # fmt: skip
NONE = "none"  # for --draft: not even the drafter that a model's own files have
OTHER_TEMPLATES = f"{TEMPLATE_FOLDER}/*.jinja"
# A quantization may follow, as llama.cpp and Ollama take it: org/name-GGUF:Q4_K_M.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]*)?)?")
POOLING = "1_Pooling/config.json"  # of sentence-transformers
ENCODER_DECODERS = ("T5ForConditionalGeneration", "WhisperForConditionalGeneration", "MarianMTModel")
_IMAGES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("image_models.toml").read_text(encoding="utf-8")
)
_MODELS, _TEXT_TYPES, _LEFT_OUT = (_IMAGES[name] for name in ("models", "text_types", "left_out"))
# How models lay out images, by their class: those whose encoder PyTorch converts, and the others.
IMAGE_MODELS: dict[str, ImageLayout] = {name: each["layout"] for name, each in _MODELS.items() if "traced" in each}
DIRECT_ENCODERS: dict[str, ImageLayout] = {
    name: each["layout"] for name, each in _MODELS.items() if "layout" in each and "traced" not in each
}
# MiniCPM-V's text part, whose keys are beside the others, by its version.
_MINICPM = "MiniCPMV"
_OF_MINICPM = {
    2.6: ("Qwen2ForCausalLM", "qwen2"),
    4.0: ("LlamaForCausalLM", "llama"),
    4.5: ("Qwen3ForCausalLM", "qwen3"),
}
# Names of tensors beside a text part: of images, sounds, and a drafter.
NO_TEXT = (
    "model.visual.", "visual.", "mtp.", "vision_tower.", "multi_modal_projector.", "model.vision_", "vision_model.",
    "model.multi_modal_", "model.audio_", "model.embed_vision.", "model.embed_audio.", "model.language_model.visual.",
    "image_newline", "model.image_newline", "vpm.", "resampler.", "model.merger.",
)  # fmt: skip
_OF_TEXT = (  # the first: saved by 5.5; the last: MiniCPM-V's
    "model.language_model.model.", "model.language_model.", "language_model.model.", "llm.model.",
)  # fmt: skip
# Architectures by class and `model_type`: Ling's is that of an older architecture, too; Kimi K2 is a DeepSeek V3.
_RENAMED = {
    ("BailingMoeV2ForCausalLM", "bailing_moe"): "bailing_moe_v2", ("DeepseekV3ForCausalLM", "kimi_k2"): "deepseek_v3",
}  # fmt: skip
_OF_MAMBA = "backbone."
_OF_EXAONE = "transformer.h."
UNQUANTISED = "Export the original checkpoint or a GGUF file."
AGAIN = "Download the checkpoint again."
_PACKAGES = ("filelock", "gguf", "huggingface_hub", "tokenizers")  # of the extra [cli]


@dataclass(frozen=True)
class Located:
    """A model's source, before its content is known."""

    id: str  # hub id, or the name of the folder or file, without its path
    kind: str  # "hub", "folder" or "gguf"
    path: Path | None  # None: not downloaded yet
    revision: str | None = None  # as given; after the download, the commit

    @property
    def fetched(self) -> Path:
        """The path of what `fetch` has returned."""
        if self.path is None:
            raise AssertionError(f"{self.id} was not fetched")
        return self.path


def check_packages() -> None:
    """Raise ExportError if packages are missing that bundles are made with."""
    if missing := [name for name in _PACKAGES if not is_installed(name)]:
        raise ExportError(f"Making a bundle of a model needs {', '.join(missing)}. Run: {install('cli')}")


def locate(name: str | Path, revision: str | None = None) -> Located:
    """Decide what `name` means, without network access.

    Raises:
        ExportError: if it is a path that does not exist.
        OptionError: if it is neither a path nor a hub id, for example too long, or a revision is given for a path.
    """
    text, path = str(name), usable(user_path(name))
    if not text.strip():
        raise OptionError("The model's name is empty. Name a .gguf file, a checkpoint folder or a hub id (org/name).")
    if path.suffix.lower() == SUFFIX and not path.is_file():
        path = next((each for each in shards_of(path) if each.is_file()), path)
    if path.is_dir() or path.is_file():
        if revision is not None:
            raise OptionError(f"Revision {revision!r} is for hub ids, and {text} is a path. Leave it out.")
        if path.is_dir():
            models = [] if (path / "config.json").is_file() else models_in(path)
            if len(models) != 1:
                return Located(as_text(path.resolve().name), "folder", path)
            path = models[0]
        if path.suffix.lower() != SUFFIX:
            raise ExportError(f"{text} is neither a checkpoint folder nor a .gguf file. Name the folder it is in.")
        first = shards_of(path)[0]
        return Located(as_text(whole_name(first.name)), "gguf", first)
    if near := nearly_gguf(path):
        raise ExportError(f"There is no {text}. {near}")
    looks_like_path = isinstance(name, Path) or path.is_absolute() or text.startswith((".", "~")) or "\\" in text
    if looks_like_path or path.suffix.lower() == ".gguf" or text.count("/") > 1:
        raise ExportError(f"There is no {text}. Name a .gguf file, a checkpoint folder or a hub id (org/name).")
    if not _HUB_ID.fullmatch(text):
        raise OptionError(f"{text!r} is neither a path that exists nor a hub id. A hub id looks like org/name.")
    return Located(text, "hub", None, revision)


def nearly_gguf(path: Path) -> str:
    """What a path that does not exist was probably meant for, in a sentence; empty unless it looks like a GGUF file."""
    suffix = path.suffix.lower()
    if not get_close_matches(suffix, [SUFFIX], cutoff=0.75) or len(suffix) > len(SUFFIX) + 1:
        return ""
    try:
        there = [each.name for each in path.parent.iterdir() if each.suffix.lower() == SUFFIX]
    except OSError:
        there = []
    found = get_close_matches(path.name, there, n=1)
    others = "Name a .gguf file, a checkpoint folder or a hub id (org/name)."
    return f"Did you mean {path.with_name(found[0])}?" if found else others


def default_output(main: str | Path, draft: str | Path | None = None) -> Path:
    """The default folder of a bundle: in the current folder, named after the main model.

    >>> default_output("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct").name
    'qwen2.5-coder-1.5b-instruct-pair'
    """
    path = Path(default_name(main, draft))
    # A checkpoint in the current folder may have that name.
    return path.with_name(f"{path.name}-bundle") if path.exists() and path.resolve() == Path(main).resolve() else path


def default_name(main: str | Path, draft: str | Path | None = None) -> str:
    """The name of a bundle that is given none, after the main model."""
    source = usable(user_path(main))
    name = source.resolve().name if source.exists() else re.split(r"[/\\]", str(main))[-1]
    name = whole_name(name).lower().removesuffix(SUFFIX)
    name = re.sub(r"[^a-z0-9._-]+", "-", name).strip("-.") or "bundle"
    return name if draft in (None, NONE) else f"{name}-pair"


def fetch(
    located: Located, trust_remote_code: bool, progress: Progress, only: tuple[str, ...] | None = None
) -> Located:
    """Download a hub id. Other sources are returned unchanged. only: patterns of the files to download.

    One of a repository of GGUF files becomes such a file.

    Raises:
        ExportError: if the download fails.
    """
    if located.kind != "hub":
        return located
    name, _, tag = located.id.partition(":")
    first = ("config.json",) if tag and only is None else only
    folder, commit = download(name, located.revision, trust_remote_code, progress, first)
    if only is None and (tag or not any(folder.glob("*.safetensors"))):
        file = download_gguf(name, folder, tag, progress)
        if file is not None:
            return replace(located, kind="gguf", path=file, revision=commit)
    return replace(located, path=folder, revision=commit)


def read_config(folder: Path, name: str | None = None) -> dict[str, Any]:
    """A checkpoint's `config.json`, for a language model that can be exported, with unquantised weights.

    For one that reads images, the keys of its language model are among the others; see `text_part`, too. name: what
    errors call it.

    Raises:
        ExportError: otherwise.
    """
    path, name = folder / "config.json", name or str(folder)
    if not path.is_file():
        names = [path.name for path in models_in(folder)]
        hint = f"Name one of its files: {', '.join(names)}." if names else "Name the folder that has it."
        raise ExportError(f"{folder} is not a checkpoint: it has no config.json. {hint}")
    with configuring(path):
        config = text_part(read_json(path))
    architectures = architectures_of(config)
    reads_images = any(name in IMAGE_MODELS for name in architectures)
    if reads_images:
        with configuring(path):
            config |= config.get("text_config") or {}
        config["architectures"] = architectures  # not the text model's, which has its own
    elif "vision_config" in config and not any("CausalLM" in name for name in architectures):
        raise ExportError(
            f"{name} holds a {(architectures or ['model'])[0]}, whose images are laid out in a way that Outrider does "
            "not know. docs/vision.md lists models whose images it reads, and what runs others."
        )
    known = "CausalLM", "LMHead", *ENCODER_DECODERS
    if architectures and not reads_images and not any(part in name for name in architectures for part in known):
        raise ExportError(
            f"{name} holds a {architectures[0]}; Outrider runs causal language models (…ForCausalLM) and "
            f"{', '.join(ENCODER_DECODERS)}."
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
        if method != "fp8" and (method != "mxfp4" or config.get("model_type") != "gpt_oss"):  # as they are published
            raise ExportError(f"{name} is quantised already ({method}). {UNQUANTISED}")
    return config


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as it is; of a model that reads images and is run without them, that of its text part."""
    names = architectures_of(config)
    if _MINICPM in names and config.get("version") in _OF_MINICPM:
        of_text, text_type = _OF_MINICPM[config["version"]]
        left = {key: value for key, value in config.items() if key not in ("vision_config", "auto_map")}
        return left | {"architectures": [of_text], "model_type": text_type}
    if (kind := _RENAMED.get((names[0] if names else "", str(config.get("model_type"))))) is not None:
        return config | {"model_type": kind}
    part = next((each for name in names if (each := _MODELS.get(name, {}).get("text"))), None)
    if part is None:
        return config
    parts = ("vision_config", "audio_config", "text_config")
    around = {key: value for key, value in config.items() if not key.endswith(parts)}
    # Whether the output matrix is the embedding is said of the whole.
    tied = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
    # Older files of Qwen's have the text's keys beside the others.
    text: dict[str, Any] = {} if "hidden_size" in config and "text_config" not in config else config["text_config"]
    kind = text.get("model_type") or config.get("model_type")
    named = {"architectures": [part], "model_type": _TEXT_TYPES.get(str(kind), kind)}
    return {**_LEFT_OUT.get(part, {}), **around, **text, **tied, **named}


def name_in_text(name: str) -> str:
    """The name in a model's text part of a tensor, without what shows that there is another part."""
    if name.startswith(_OF_MAMBA):  # Transformers saves the embedding under another name than NVIDIA
        return name.replace(_OF_MAMBA, "model.", 1).replace("model.embedding.", "model.embeddings.", 1)
    if name.startswith(_OF_EXAONE):
        return name.replace(_OF_EXAONE, "model.layers.", 1)
    prefix = next((each for each in _OF_TEXT if name.startswith(each)), "")
    if prefix and (rest := name.removeprefix(prefix)).startswith("lm_head."):
        return rest
    return f"model.{name.removeprefix(prefix)}" if prefix else name.removeprefix("language_model.").removeprefix("llm.")


@contextmanager
def configuring(where: Path | str) -> Iterator[None]:
    """Turn errors from values of a wrong type into one that names their file, or the model.

    The block uses what configuration files say, whose values may be anything.
    """
    try:
        yield
    except OutriderError:
        raise
    except (*FAULTS, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ExportError(
            f"{where} is damaged: a value in it is not what it has to be ({why(error)}). {AGAIN}"
        ) from error


def architectures_of(config: dict[str, Any]) -> list[str]:
    """The names of the model's class in a `config.json`; none if it does not say."""
    names = config.get("architectures")
    return list(map(str, names)) if isinstance(names, list) else []


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


def read_templates(folder: Path) -> ChatTemplates:
    """A checkpoint's chat templates.

    Raises:
        ExportError: if one of their files cannot be read.
    """
    try:
        return ChatTemplates.read(folder)
    except FAULTS as error:
        raise ExportError(f"The chat template in {folder} cannot be read: {why(error)}. {AGAIN}") from error
