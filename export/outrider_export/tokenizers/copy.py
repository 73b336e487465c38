"""Copies the tokenizer files of a checkpoint folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.tokenizers import gguf_tokenizer, marian_tokenizer
from outrider_export.tokenizers.files import copy_files


def copy_tokenizer(header: GGUFHeader | None, path: Path, folder: Path) -> None:
    """Copy a model's tokenizer files to a new folder. header: of the GGUF file at `path`; None for a checkpoint."""
    if header is not None:
        gguf_tokenizer.write_tokenizer(header, folder)
    elif marian_tokenizer.is_marian(path):
        marian_tokenizer.write_tokenizer(path, folder)
    else:
        copy_files(path, folder)
