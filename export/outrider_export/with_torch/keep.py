"""Child process: a GGUF file to OpenVINO IR with unconverted weights, by openvino-genai's own reader, without torch.

Rounding errors of the reader are corrected afterwards: see `gguf_minima`.

Job: `gguf`, the file; `output`, the folder for openvino_model; `scratch`, a folder for anything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino

from outrider.system.core import new_core
from outrider_export.direct.gguf_minima import has_minima, restore_minima
from outrider_export.progress import Progress
from outrider_export.sources.gguf_copy import write_whole_copy
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.gguf_shards import shards_of
from outrider_export.target import link_or_copy


def keep(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert `job["gguf"]`. All files are in `job["output"]` when this returns."""
    import openvino_genai

    progress.phase("convert")
    output, scratch = Path(job["output"]), Path(job["scratch"])
    scratch.mkdir(parents=True)
    # The reader writes into the folder of the file that it reads, so give it a link in our own folder.
    alias = scratch / "model.gguf"
    header = read_header(Path(job["gguf"]))
    if len(shards_of(header.path)) > 1:
        write_whole_copy(header, alias)
    else:
        link_or_copy(header.path, alias)
    # It compiles what it writes. In bf16, with AMX and one thread, OpenVINO 2026.4 would divide by zero.
    openvino_genai.LLMPipeline(str(alias), "CPU", enable_save_ov_model=True, INFERENCE_PRECISION_HINT="f32")
    if has_minima(header):
        _move_restored(scratch, output, header)
    else:
        move_model(scratch, output)  # but not the reader's tokenizer: see `tokenizers.ir`
    return {}


def _move_restored(source: Path, target: Path, header: GGUFHeader) -> None:
    model = new_core().read_model(source / "openvino_model.xml")
    restore_minima(model, header)
    target.mkdir(parents=True)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)


def move_model(source: Path, target: Path) -> None:
    """Move openvino_model.xml and .bin, and no other files, to a new folder."""
    target.mkdir(parents=True)
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (source / name).rename(target / name)


if __name__ == "__main__":
    from outrider_export.child import serve

    serve(keep)
