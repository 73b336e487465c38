"""Child process: a checkpoint folder or a GGUF file to stateful OpenVINO IR, through torch.

For models that `outrider_export.direct` does not convert.

Job: `model`, the checkpoint folder or the GGUF file; `gguf`, whether it is one; `weights`; `output`, the folder for
openvino_model; `scratch`, a folder for the uncompressed IR; `trust_remote_code`; `adapter`, the folder of a LoRA
adapter that is merged into it, if any.

int8 is 8 bits, asymmetric, one scale per output channel, as optimum-intel's int8. int4 is 4 bits, asymmetric,
groups of 64, with embedding and output matrix in int8: the smallest groups that openvino's kernels run at full speed.
"""

from __future__ import annotations

import contextlib
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openvino

from outrider.errors import ExportError, one_line
from outrider.system.core import new_core
from outrider_export.describe.architectures import ARCHITECTURES, LAST_TRANSFORMERS, describe_layers, settle_positions
from outrider_export.progress import Progress
from outrider_export.sources.gguf_copy import write_slim_copy
from outrider_export.sources.peft_adapter import LoraAdapter, check_fits, read_adapter
from outrider_export.with_torch.comparison import Comparison

INT4_GROUP_SIZE = 64
_TASK = "text-generation-with-past"


def convert(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert the model that `job` describes. All files are written when this returns."""
    Path(job["scratch"]).mkdir(parents=True, exist_ok=True)
    progress.phase("read")
    return convert_loaded(load_model(job), job, progress)


def convert_loaded(model: Any, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The same for a torch model that was loaded for it."""
    output, scratch = Path(job["output"]), Path(job["scratch"])
    weights: str = job["weights"]
    progress.phase("convert")
    compressed = weights in ("int8", "int4")
    settled = settle_positions(model.config)
    is_tried = model.config.model_type in ARCHITECTURES
    comparison = None if is_tried else Comparison(model)
    _to_ir(model, scratch / "ir", weights)
    if comparison is not None:
        progress.phase("compare")
        comparison.check_openvino(scratch / "ir" / "openvino_model.xml")
    # The graph says which sliding windows it has: see `check_ir`.
    layers = describe_layers(model.config) | settled | {"sliding_windows": None}
    for name, value in settled.items():
        progress.note(f"Its {name.replace('_', ' ')} is {value:,}: see 'LongRoPE' in docs/models.md.")
    tied = bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    del model
    if compressed:
        progress.phase("compress")
        compress(new_core().read_model(scratch / "ir" / "openvino_model.xml"), output / "openvino_model.xml", weights)
        # On Windows a file that is still mapped cannot be removed; the parent removes what is left.
        shutil.rmtree(scratch / "ir", ignore_errors=True)
    else:
        _move_model(scratch / "ir", output)
    return {"tied_embeddings": tied, "layers": layers}


def load(loader: Any, folder: Path | str, **options: Any) -> Any:
    """A torch model from a folder. loader: a class of Transformers'.

    Raises:
        ExportError: when the files lack weights, which Transformers would draw at random.
    """
    options = {"use_safetensors": True} | options if "gguf_file" not in options else options
    model, info = loader.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    lacking = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))  # which nothing reads
    if lacking:
        raise ExportError(
            f"{folder} has no {lacking[0]}, one of {len(lacking)} tensors that its configuration asks for. "
            "Download the checkpoint again, or save it again with save_pretrained."
        )
    return model


def load_model(job: dict[str, Any]) -> Any:
    """The torch model, in the precision in which it is converted."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(job["model"])
    if job["gguf"]:
        # transformers would read the tokenizer's 150,000 strings twice, 10 s each time, and we have built one already.
        path = Path(job["scratch"]) / "slim.gguf"
        write_slim_copy(Path(job["model"]), path)
    # A GGUF file's weights are unpacked to float32. For weights of up to 8 bits, half precision is exact enough and
    # takes half the memory. Checkpoints stay in their own precision until they are compressed.
    compressed: Any = torch.float16 if job["gguf"] else "auto"
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(job["weights"], compressed)
    where = {"gguf_file": path.name} if job["gguf"] else {}
    folder = path.parent if job["gguf"] else path
    model = load(AutoModelForCausalLM, folder, dtype=dtype, trust_remote_code=job["trust_remote_code"], **where)
    if job["gguf"]:
        with contextlib.suppress(PermissionError):  # Windows, as above
            path.unlink()
    if job.get("adapter"):
        merge(model, read_adapter(Path(job["adapter"])))
    return model


def merge(model: Any, adapter: LoraAdapter) -> None:
    """Add an adapter's changes to the weights of a torch model, in float32; as PEFT's `safe_merge`.

    Raises:
        ExportError: when it does not fit; then nothing was changed.
    """
    import torch

    modules = dict(model.named_modules())
    tied = model.get_output_embeddings()
    if tied is not None and tied.weight is not model.get_input_embeddings().weight:
        tied = None

    def find(name: str) -> tuple[int, ...] | str | None:
        module = modules.get(name)
        if module is None or (isinstance(module, torch.nn.Linear) and module is not tied):
            return None if module is None else tuple(module.weight.shape)
        return "shares its weights with the embedding" if module is tied else f"is a {type(module).__name__}"

    check_fits(adapter, find)
    with torch.no_grad():
        for name, change in adapter.modules.items():
            weight = modules[name].weight
            added = torch.from_numpy(change.up) @ torch.from_numpy(change.down) * change.scale
            weight.copy_((weight.float() + added).to(weight.dtype))


def _to_ir(model: Any, folder: Path, weights: str) -> None:
    import torch
    from optimum.intel.openvino import OVConfig, OVWeightQuantizationConfig

    register(model.config.model_type)
    # Naming the quantisation only avoids a KV cache precision in the IR; the weights are compressed afterwards.
    config = (
        OVConfig(dtype=weights)
        if weights in ("fp16", "fp32")
        else OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=False))
    )
    is_half = model.dtype in (torch.float16, torch.bfloat16)
    export_ir(model, folder, _TASK, ov_config=config, stateful=True, patch_16bit_model=is_half)


def export_ir(model: Any, folder: Path, task: str, **options: Any) -> None:
    """Have optimum-intel write the graphs of a torch model, by default in float32 and without a state.

    Raises:
        ExportError: for an architecture that it does not know, or not with this version of Transformers.
    """
    from optimum.exporters.openvino import export_from_model
    from optimum.intel.openvino import OVConfig

    options = {"ov_config": OVConfig(dtype="fp32"), "stateful": False} | options
    try:
        export_from_model(model, folder, task=task, **options)
    except ValueError as error:
        raise ExportError(
            f"optimum-intel {version('optimum-intel')} does not export the architecture '{model.config.model_type}' "
            f"with Transformers {version('transformers')} for {task}: {one_line(error)[:200]}. docs/models.md lists "
            "those that run."
        ) from error


def register(architecture: str) -> None:
    """Let optimum-intel export an architecture of `ARCHITECTURES` that it has no export for."""
    known = ARCHITECTURES.get(architecture)
    if known is not None and known.like:
        lift(architecture, "text-generation", _TASK, like=known.like)


def lift(architecture: str, *tasks: str, like: str = "") -> None:
    """Let optimum-intel export an architecture for these tasks with `LAST_TRANSFORMERS`, and as it does `like`."""
    import optimum.exporters.openvino.model_configs  # noqa: F401 - it registers the others
    from optimum.exporters.tasks import TasksManager

    made = TasksManager.get_exporter_config_constructor(
        "openvino", model_type=like or architecture, task=tasks[-1], library_name="transformers"
    )
    base: Any = getattr(made, "func", made)
    add = TasksManager.create_register("openvino", overwrite_existing=True)
    own = type(base.__name__, (base,), {"MAX_TRANSFORMERS_VERSION": LAST_TRANSFORMERS})
    add(architecture, *tasks, library_name="transformers")(own)


def compress(model: Any, target: Path, weights: str) -> None:
    """Compress a graph's weights to "int8" or "int4", and write it to the file `target`."""
    import nncf

    if weights == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    else:
        model = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=INT4_GROUP_SIZE,
            ratio=1.0,
            advanced_parameters=nncf.AdvancedCompressionParameters(
                group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
            ),
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, target, compress_to_fp16=False)


def save_weights(model: Any, target: Path, weights: str) -> None:
    """Write a graph to the file `target`, with its weights in a format of any kind."""
    if weights in ("int8", "int4"):
        compress(model, target, weights)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        openvino.save_model(model, target, compress_to_fp16=weights == "fp16")


def _move_model(source: Path, target: Path) -> None:
    """Move openvino_model.xml and .bin, and no other files, to a new folder."""
    target.mkdir(parents=True)
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (source / name).rename(target / name)
