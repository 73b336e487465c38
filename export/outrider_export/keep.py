"""Child process: a GGUF file to OpenVINO IR by openvino-genai's own reader. No torch; the file's weights are kept.

Job: `gguf`, the file; `output`, the folder for openvino_model; and, for the model that brings the tokenizer,
`tokenizer`: the folder with tokenizer.json, which gets openvino_tokenizer and openvino_detokenizer.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider_export.tokenizer_ir import write_tokenizer_ir

if TYPE_CHECKING:
    from outrider_export.progress import Progress


def keep(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert `job["gguf"]`; the files are in `job["output"]` when this returns."""
    import openvino_genai

    progress.phase("convert")
    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    # The reader writes beside the file it reads: give it a second name for the file, in a folder of ours.
    alias = output / "model.gguf"
    link_or_copy(Path(job["gguf"]), alias)
    try:
        openvino_genai.LLMPipeline(str(alias), "CPU", enable_save_ov_model=True)
    finally:
        alias.unlink(missing_ok=True)
    remove_all_but_model(output)  # the reader's tokenizer is not the one we want: see tokenizer_ir
    if "tokenizer" in job:
        progress.phase("tokenizer")
        write_tokenizer_ir(Path(job["tokenizer"]))
    return {}


def remove_all_but_model(folder: Path) -> None:
    """Leave openvino_model.xml and .bin: what else the libraries write is of no use to the runtime."""
    for path in folder.iterdir():
        if path.name not in ("openvino_model.xml", "openvino_model.bin"):
            path.unlink()


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none. A symbolic link would be followed to the source."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    from outrider_export.child import serve

    serve(keep)
