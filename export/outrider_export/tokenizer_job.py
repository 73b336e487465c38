"""Child process: OpenVINO's tokenizer and detokenizer for the tokenizer of a checkpoint.

Job: `model`, the checkpoint folder or GGUF file that the tokenizer comes from; `tokenizer`, the folder with its
tokenizer.json, which gets openvino_tokenizer and openvino_detokenizer; and, if allowed,
`trust_remote_code`. Byte-level BPE needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider_export.plan import check_extra
from outrider_export.tokenizer_check import check_tokenizer_ir
from outrider_export.tokenizer_ir import write_tokenizer_ir

if TYPE_CHECKING:
    from outrider_export.progress import Progress


def add_tokenizer(job: dict[str, Any]) -> None:
    """Write openvino_tokenizer and openvino_detokenizer, and check them against tokenizer.json if that can be read.

    Raises:
        ExportError: if they differ, or the kind of tokenizer needs packages that are not installed.
    """
    folder = Path(job["tokenizer"])
    if not write_tokenizer_ir(folder):
        check_extra("This kind of tokenizer", "openvino")
        _convert_with_transformers(Path(job["model"]), folder, job.get("trust_remote_code", False))
    if find_spec("tokenizers"):
        check_tokenizer_ir(folder)


def work(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The work function of this child process."""
    progress.phase("tokenizer")
    add_tokenizer(job)
    return {}


def _convert_with_transformers(source: Path, folder: Path, trust_remote_code: bool) -> None:
    """Convert other kinds of tokenizers with openvino_tokenizers."""
    import openvino
    from openvino_tokenizers import convert_tokenizer as convert
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    # Cleaning up spaces would change text that was already shown when the next token comes.
    encoder, decoder = convert(tokenizer, with_detokenizer=True, clean_up_tokenization_spaces=False)
    openvino.save_model(encoder, folder / "openvino_tokenizer.xml")
    openvino.save_model(decoder, folder / "openvino_detokenizer.xml")


if __name__ == "__main__":
    from outrider_export.child import serve

    serve(work)
