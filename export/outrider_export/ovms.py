"""Writes a bundle as a repository of OpenVINO Model Server: `outrider export --for ovms`.

    write_for_ovms(read_bundle("my-pair"), Path("models"), name="my-pair", drafter="draft", draft_device="GPU")

    models/config.json             names the model and its folder
    models/my-pair/graph.pbtxt     the graph with the options of its calculator
    models/my-pair/…               the main model and the tokenizer, as openvino-genai reads them
    models/my-pair/draft/…         the draft model, likewise

The options are those of `LLMCalculatorOptions` (src/llm/llm_calculator.proto there); the graph around them is the one
that its documentation (docs/llm/reference.md) gives for all text models.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from outrider.bundle.fit import check_writes
from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import MODEL_NAMES, DrafterEntry, ModelEntry
from outrider.errors import ExportError, OptionError, nearest
from outrider_export.heads.genai import write_for_genai
from outrider_export.target import Target

GRAPH_NAME = "graph.pbtxt"
_DRAFT = "draft"  # folder of the draft model, in the main model's
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DEVICE = re.compile(r"[A-Za-z0-9_.:,-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How Model Server runs a bundle.

    drafter: a draft model or EAGLE-3 drafter of the bundle, "ngram" for its prompt lookup, None for plain decoding;
    "auto" is the bundle's first that it can run, if any. draft_device: None is the main model's. cache_size,
    draft_cache_size: whole GB; 0 grows as needed. draft_cache_size: None is the main model's.
    """

    drafter: str | None = "auto"
    main_device: str = "CPU"
    draft_device: str | None = None
    cache_size: int = 0
    draft_cache_size: int | None = None


def write_for_ovms(bundle: Bundle, folder: Path, name: str, serving: Serving) -> None:
    """Write a new model repository, with the bundle's models as `name`.

    Raises:
        OptionError: for a bad name, device or size, or a drafter that the bundle does not have.
        ExportError: when Model Server cannot run the models, the folder exists, or it cannot be written.
    """
    drafter = _check(bundle, name, serving)
    try:
        with Target(folder, overwrite=False) as target:
            served = target.new / name
            served.mkdir()
            _copy_model(bundle, bundle.manifest.main, served)
            if drafter is not None:
                _write_draft(bundle, drafter, served / _DRAFT)
            graph = _graph(_options(bundle, drafter, serving))
            (served / GRAPH_NAME).write_text(graph, encoding="utf-8", newline="\n")
            config = {"model_config_list": [{"config": {"name": name, "base_path": name}}]}
            (target.new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            target.commit()
    except OSError as error:
        raise ExportError(f"{folder} cannot be written: {error.strerror}. Choose another folder with -o.") from error


def _check(bundle: Bundle, name: str, serving: Serving) -> DrafterEntry | None:
    """Check what can be checked before anything is written. Returns the drafter that needs files."""
    if not _NAME.fullmatch(name):
        raise OptionError(f"{name!r} is not a name for a model: use letters, digits, '.', '_' and '-'. Change -o.")
    check_writes(bundle.manifest, bundle.folder)
    if bundle.manifest.main.format != "openvino":
        raise ExportError("Model Server's language models are OpenVINO's, and the main model is in ONNX.")
    if bundle.manifest.main.encoder is not None:
        raise ExportError("Model Server's repository is written for decoders, and this is an encoder-decoder model.")
    for option, device in (("main_device", serving.main_device), ("draft_device", serving.draft_device)):
        if device is not None and not _DEVICE.fullmatch(device):
            raise OptionError(f"{option}={device!r} is not a device's name. Give one such as CPU, GPU or GPU.1.")
    for option, size in (("cache_size", serving.cache_size), ("draft_cache_size", serving.draft_cache_size)):
        if size is not None and size < 0:
            raise OptionError(f"{option}={size} is less than 0. Give whole GB; 0 grows as needed.")
    drafter = _find_drafter(bundle, serving.drafter)
    if drafter is None and (serving.draft_device, serving.draft_cache_size) != (None, None):
        raise OptionError("draft_device and draft_cache_size are a draft model's, and none is served. Leave them out.")
    return drafter


def _find_drafter(bundle: Bundle, name: str | None) -> DrafterEntry | None:
    entries = {entry.name: entry for entry in bundle.manifest.drafters}
    if name == "auto":
        return next((entry for entry in entries.values() if _why_not(entry) is None), None)
    if name in (None, "ngram"):
        return None
    if name not in entries:
        raise OptionError(f"{bundle.folder} has no drafter '{name}'. {nearest(str(name), (*entries, 'ngram', 'none'))}")
    if reason := _why_not(entries[name]):
        raise ExportError(f"Model Server cannot draft with '{name}': {reason}.")
    return entries[name]


def _why_not(entry: DrafterEntry) -> str | None:
    """Why Model Server cannot run a drafter; None if it can."""
    if entry.kind == "eagle3":
        return None
    if entry.kind != "draft_model":
        return f"it is of kind {entry.kind}, and there are draft models and EAGLE-3 only"
    if entry.model.format != "openvino":
        return "it is in ONNX"
    if entry.vocabulary != "same":
        return "its vocabulary is not the main model's"
    if entry.num_proposed_tokens is not None:
        return "its output matrix was cut. Export the pair without --draft-vocab"
    return None


def _copy_model(bundle: Bundle, model: ModelEntry, folder: Path) -> None:
    """Copy a model and the tokenizer, and write what the server reads of Hugging Face's two files."""
    for name in MODEL_NAMES["openvino"]:
        shutil.copyfile(bundle.folder / model.folder / name, folder / name)
    for path in bundle.tokenizer_path.iterdir():
        shutil.copyfile(path, folder / path.name)
    tokenizer, geometry = bundle.manifest.tokenizer, model.geometry
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    generation = {"eos_token_id": list(tokenizer.eos_token_ids), **{k: v for k, v in ids.items() if v is not None}}
    config = {"model_type": geometry.architecture, "max_position_embeddings": geometry.context_length}
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_draft(bundle: Bundle, drafter: DrafterEntry, folder: Path) -> None:
    if drafter.kind == "eagle3":
        write_for_genai(bundle, drafter.name, folder)
        return
    folder.mkdir()
    _copy_model(bundle, drafter.model, folder)


def _options(bundle: Bundle, drafter: DrafterEntry | None, serving: Serving) -> dict[str, str | int | bool]:
    """The fields of LLMCalculatorOptions. Paths are relative to the graph's folder."""
    options: dict[str, str | int | bool] = {
        "models_path": "./",
        "device": serving.main_device,
        "cache_size": serving.cache_size,
        "enable_prefix_caching": True,
    }
    if serving.drafter == "ngram":
        # Its documentation wants prompts to be read in one piece.
        whole = {"dynamic_split_fuse": False, "max_num_batched_tokens": bundle.manifest.main.geometry.context_length}
        return options | whole | {"plugin_config": json.dumps({"prompt_lookup": True})}
    if drafter is None:
        return options
    options |= {
        "draft_models_path": _DRAFT,
        "draft_device": serving.draft_device or serving.main_device,  # the server has no default
        "draft_cache_size": serving.cache_size if serving.draft_cache_size is None else serving.draft_cache_size,
    }
    return options | ({"draft_eagle3_mode": True} if drafter.kind == "eagle3" else {})


def _graph(options: dict[str, str | int | bool]) -> str:
    """The graph's text; see the module's docstring."""
    # JSON's literals are those of protobuf's text format, for what we write.
    lines = "\n".join(f"      {name}: {json.dumps(value)}" for name, value in options.items())
    return _GRAPH.replace("OPTIONS", lines)


_GRAPH = """\
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"
node {
  name: "LLMExecutor"
  calculator: "HttpLLMCalculator"
  input_stream: "LOOPBACK:loopback"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  input_side_packet: "LLM_NODE_RESOURCES:llm"
  output_stream: "LOOPBACK:loopback"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  input_stream_info { tag_index: "LOOPBACK:0" back_edge: true }
  node_options {
    [type.googleapis.com/mediapipe.LLMCalculatorOptions] {
OPTIONS
    }
  }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler"
    options { [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } } }
  }
}
"""
