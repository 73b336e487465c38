"""Imports models that are in ONNX already into a bundle, without torch: `outrider import`.

    bundle = import_bundle("qwen-onnx", "small-qwen-onnx", output="my-pair", file="onnx/model_q4.onnx")

A model is a folder with tokenizer.json and either onnxruntime-genai's genai_config.json, which names the model's file,
or config.json and the model as onnx/model.onnx, onnx/model_q4.onnx and the like, as in the folders of
onnx-community on the Hugging Face hub. The weights stay as they are; the graph gets a bundle's inputs, see
`outrider_export.onnx.inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import ModelEntry
from outrider.errors import ExportError, OptionError
from outrider_export.bundles.convert_model import convert_tokenizer, describe_model
from outrider_export.bundles.export import finish
from outrider_export.describe.geometry import check_architecture, geometry_of_config, geometry_of_genai
from outrider_export.describe.pairing import pair_vocabularies
from outrider_export.describe.plan import TOKENIZER_BYTES, Plan, check_width
from outrider_export.onnx.check import check_graph
from outrider_export.onnx.files import data_files, import_onnx, load, save
from outrider_export.onnx.graph import weights_of
from outrider_export.onnx.inputs import add_default, add_extra_rows, add_rows, write_head_size
from outrider_export.progress import ForModel, Progress, Silent
from outrider_export.sources.source import OTHER_TEMPLATES, TOKENIZER_FILES, Located, fetch, locate, read_json
from outrider_export.target import Target, check_space
from outrider_export.tokenizers.vocabulary import Vocabulary

_NUM_LOGITS = "num_logits_to_keep"  # an input of newer models of onnx-community; 0 means all
_CONFIGS = ("config.json", "generation_config.json", "genai_config.json")


@dataclass(frozen=True)
class _Found:
    """A model that was read and checked."""

    plan: Plan
    file: Path  # below plan.path
    graph: Any  # the onnx.ModelProto, with a bundle's inputs

    @property
    def num_bytes(self) -> int:
        data = sum((self.file.parent / name).stat().st_size for name in data_files(self.graph, self.file.parent))
        return self.file.stat().st_size + data


def import_bundle(
    main: str | Path,
    draft: str | Path | None = None,
    *,
    output: str | Path,
    file: str | None = None,
    draft_file: str | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Make a bundle at `output` of a main model in ONNX, and of a draft model for it.

    file, draft_file: which of the models in the folder, by its name there: "onnx/model_q4.onnx".

    Raises:
        OptionError: for an invalid option.
        VocabularyMismatch: if the draft model has no token in common with the main model.
        ExportError: if a model cannot be found, read or run by Outrider, or the bundle cannot be written.
    """
    progress = progress or Silent()
    import_onnx()
    if draft is None and (draft_file or draft_revision):
        raise OptionError("draft_file and draft_revision are for a draft model. Name one with --draft.")
    named = [("main", _locate(main, revision, file), file)]
    if draft is not None:
        named.append(("draft", _locate(draft, draft_revision, draft_file), draft_file))
    try:
        with Target(Path(output), overwrite) as target:
            for leftover in target.leftovers:
                progress.note(f"{leftover} was left behind by an import that was killed; it can be deleted.")
            found = [_look(role, source, name, ForModel(progress, role)) for role, source, name in named]
            plans = [model.plan for model in found]
            pairings = [pair_vocabularies(plans[0], plan, progress) for plan in plans[1:]]
            check_space(target.output.parent, sum(model.num_bytes for model in found) + TOKENIZER_BYTES)
            # A draft model has its own tokenizer only with another vocabulary.
            folders = ["tokenizer", *(None if p.vocabulary == "same" else "draft-tokenizer" for p in pairings)]
            entries = [
                _take(model, folder, target.new, ForModel(progress, model.plan.role))
                for model, folder in zip(found, folders, strict=True)
            ]
            return finish(target, plans, entries, pairings, progress)
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}.") from error


def _locate(name: str | Path, revision: str | None, file: str | None) -> Located:
    source = locate(name, revision)
    if source.kind == "gguf":
        raise ExportError(f"{name} is a GGUF file, not a folder with a model in ONNX. Use: outrider export {name}")
    if source.kind == "hub" and file is None:
        raise OptionError(
            f"{source.id} may have its model in several files. Name one, such as --file onnx/model_q4.onnx: "
            f"huggingface.co/{source.id}/tree/main lists them."
        )
    return source


def _look(role: str, source: Located, name: str | None, progress: Progress) -> _Found:
    """Read one model, and check that it is complete and that Outrider can run it."""
    source = fetch(source, False, progress, (*_CONFIGS, *TOKENIZER_FILES, OTHER_TEMPLATES, f"{name}", f"{name}?data*"))
    folder = source.fetched
    config, genai = read_json(folder / "config.json"), read_json(folder / "genai_config.json")
    if not (config or genai):
        raise ExportError(f"{folder} has no config.json and no genai_config.json. Download one of them, too.")
    if genai and config:
        check_architecture(config, folder)
    geometry = geometry_of_genai(genai, folder) if genai else geometry_of_config(config, folder)
    path = _choose(folder, name, genai)
    vocabulary = Vocabulary.of_folder(folder)
    graph = load(path)
    if _NUM_LOGITS in {each.name for each in graph.graph.input} - {each.name for each in graph.graph.initializer}:
        add_default(graph, _NUM_LOGITS, 0)
    check_graph(graph.graph, path, geometry)
    write_head_size(graph.graph, geometry.head_size)
    add_rows(graph)
    add_extra_rows(graph)
    plan = Plan(
        role, source, folder, "onnx", weights_of(graph), geometry, vocabulary, None, _with_eos(config, genai), 0
    )
    check_width(plan)
    return _Found(plan, path, graph)


def _choose(folder: Path, name: str | None, genai: dict[str, Any]) -> Path:
    """The model's file: `name`, the one in genai_config.json, or the only one."""
    paths = [*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    if not names:
        raise ExportError(f"{folder} has no model in ONNX (*.onnx). To make one of a checkpoint: outrider export.")
    chosen = name or genai.get("model", {}).get("decoder", {}).get("filename")
    if chosen is None and len(names) == 1:
        chosen = names[0]
    if chosen is None:
        raise OptionError(f"{folder} has {len(names)} models. Choose one with --file: {', '.join(names)}.")
    if not (folder / chosen).is_file() or Path(chosen).is_absolute() or ".." in Path(chosen).parts:
        raise ExportError(f"{folder} has no {chosen}. It has {', '.join(names)}.")
    return folder / chosen


def _with_eos(config: dict[str, Any], genai: dict[str, Any]) -> dict[str, Any]:
    """config.json with the EOS ids of both configurations."""
    given = [config.get("eos_token_id"), genai.get("model", {}).get("eos_token_id")]
    ids = [token_id for ids in given for token_id in (ids if isinstance(ids, list) else [ids])]
    return config | {"eos_token_id": ids}


def _take(model: _Found, tokenizer: str | None, bundle: Path, progress: Progress) -> ModelEntry:
    """Copy a model to its folder in the bundle, and its tokenizer to the folder `tokenizer`, if any."""
    plan, folder = model.plan, bundle / model.plan.role
    progress.phase("copy", model.num_bytes)
    save(model.graph, model.file.parent, folder, progress.advance)
    if tokenizer:
        convert_tokenizer(plan, bundle / tokenizer, False, progress)
    file = model.file.relative_to(plan.path).as_posix()
    recipe = {"route": "import", "file": file} | {name: version(name) for name in ("onnx", "openvino-tokenizers")}
    geometry = msgspec.structs.replace(plan.geometry, sliding_windows=(0,) * plan.geometry.num_layers)
    return describe_model(plan, geometry, "onnx", recipe)
