"""A checkpoint's tokenizer files: read in any spelling that was ever published, and copied to a bundle in one.

Older files leave out keys that came later (`byte_fallback`, `fuse_unk`), spell merges as texts, or have
`add_prefix_space` where newer ones have `prepend_scheme`. The `tokenizers` library reads them all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError, one_line
from outrider.inputs.text.chat_template import DEFAULT, TEMPLATE_FILE
from outrider.system.files import FAULTS
from outrider_export.sources.source import TOKENIZER_FILES, read_json, read_templates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"


def read_tokenizer(folder: Path, *, decodes_only: bool = False) -> Tokenizer:
    """The tokenizer of a folder. Its `to_str` has today's spelling.

    decodes_only: merges whose pieces are not in the vocabulary are left out: no token is the worse for it.

    Raises:
        ExportError: if the `tokenizers` library does not read it.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER
    try:
        text = path.read_text(encoding="utf-8")
        return Tokenizer.from_str(_without_lost_merges(json.loads(text)) if decodes_only else text)
    except (*FAULTS, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # the library's own is a plain Exception
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ExportError:
    from importlib.metadata import version

    return ExportError(
        f"{path} is no tokenizer that tokenizers {version('tokenizers')} reads: {one_line(error)[:200]}. Save it again "
        "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
    )


def _without_lost_merges(tokenizer: dict[str, Any]) -> str:
    model = tokenizer["model"]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        known = model["vocab"]
        model["merges"] = [
            [left, right] for left, right in pairs if left in known and right in known and left + right in known
        ]
    return json.dumps(tokenizer)


def copy_files(source: Path, folder: Path) -> None:
    """Copy a checkpoint's tokenizer files to a new folder, with special tokens as plain texts."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    templates = read_templates(source).by_name
    if {*templates} - {DEFAULT}:
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)  # a bundle's tokenizer has no folders in it
    for name in (CONFIG, SPECIAL):
        content = read_json(folder / name)
        plain = {key: _plain(value) for key, value in content.items()}
        if name == CONFIG and templates:
            plain["chat_template"] = in_config(templates)
        if plain != content:
            text = json.dumps(plain, ensure_ascii=False, indent=2)
            (folder / name).write_text(text, encoding="utf-8", newline="\n")


def write_files(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((TOKENIZER, tokenizer), (CONFIG, config)):
        text = json.dumps(content, ensure_ascii=False)  # with an indent, vocabularies would take a second
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def in_config(templates: Mapping[str, str]) -> str | list[dict[str, str]]:
    """Chat templates by name, of which there is one at least, as tokenizer_config.json has them."""
    if {*templates} == {DEFAULT}:
        return templates[DEFAULT]
    return [{"name": name, "template": text} for name, text in templates.items()]


def _plain(value: Any) -> Any:
    """The text of an added token that is written as an object, which openvino-genai does not read."""
    is_token = isinstance(value, dict) and "content" in value and {"lstrip", "rstrip"} <= value.keys()
    return value["content"] if is_token else value
