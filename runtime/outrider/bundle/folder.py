"""A bundle on disk: reads it, and checks what can be checked quickly."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tokenize import TokenError
from typing import TYPE_CHECKING

import msgspec

from outrider.bundle.fit import check_fit
from outrider.bundle.hashes import sha256_of
from outrider.bundle.manifest import (
    ADAPTER_NAMES,
    BYTES_NAME,
    MANIFEST_NAME,
    MAP_NAME,
    MODEL_NAMES,
    PROPOSED_NAME,
    SCHEMA_VERSION,
    VERSION,
    WEIGHTS_NAMES,
    DrafterEntry,
    Manifest,
)
from outrider.errors import BundleError, OptionError
from outrider.system.files import FAULTS, check_seal, reading, shown, why
from outrider.system.nesting import check_json
from outrider.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from outrider.bundle.manifest import AdapterEntry, FileEntry, Geometry, ModelEntry, TokenizerEntry

# For weights, and for larger files than this, only the size is checked. All other files are hashed at every start,
# because wrong bytes in a tokenizer's file would end the process. The 22 MB of a Qwen2.5 pair take 27 ms.
_HASHED_BYTES = 64 << 20
_AGAIN = "Export the bundle again."


@dataclass(frozen=True)
class PairToMake:
    """A pair whose draft model is not converted yet.

    make: converts it, if that was not done, and gives the pair's bundle. begin: converts it in another process, which
    goes on when this one ends; what it returns says whether that has ended, and raises ExportError if it failed.
    """

    draft: Geometry
    make: Callable[[], Bundle]
    begin: Callable[[], Callable[[], bool]]


@dataclass(frozen=True)
class Bundle:
    """A bundle's folder and its manifest. pair: this has the main model of that alone."""

    folder: Path
    manifest: Manifest
    pair: PairToMake | None = field(default=None, compare=False)

    def model_path(self, model: ModelEntry) -> Path:
        """The file that the backend of `model.format` opens."""
        return self.folder / model.folder / MODEL_NAMES[model.format][0]

    def adapter_path(self, adapter: AdapterEntry) -> Path:
        """The file with an adapter's matrices; see `outrider.models.backends.adapters.Adapter`."""
        return self.folder / adapter.folder / ADAPTER_NAMES[0]

    @property
    def tokenizer_path(self) -> Path:
        """The folder of the tokenizer."""
        return self.folder / self.manifest.tokenizer.folder

    def read_token_bytes(self, tokenizer: TokenizerEntry, vocab_size: int) -> list[bytes]:
        """The bytes of each token id; for a special token those of its name.

        Raises:
            BundleError: when the file does not have `vocab_size` tokens.
        """
        path = self.folder / tokenizer.folder / BYTES_NAME
        with reading(str(path), _AGAIN, BundleError):
            token_bytes = msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
        if len(token_bytes) != vocab_size:
            raise BundleError(
                f"{path} has {len(token_bytes):,} tokens; the vocabulary has {vocab_size:,}. Export the bundle again."
            )
        return token_bytes

    def read_map(self, drafter: DrafterEntry) -> NDArray[np.int32]:
        """int32 [draft vocab]: for each draft id the main id of the same token, or −1.

        Raises:
            BundleError: when the file is no map between the two vocabularies.
        """
        path = self.folder / drafter.model.folder / MAP_NAME
        to_main = _read_ids(path, drafter.model.vocab_size, "draft token", -1, self.manifest.main.vocab_size)
        if to_main.max() < 0:
            raise BundleError(
                f"{path} has no token in common with the main model, so it cannot draft. Export the bundle again."
            )
        return to_main

    def read_proposed(self, drafter: DrafterEntry) -> NDArray[np.int32]:
        """int32 [logits width], ascending: the draft id of each logit of a drafter whose output matrix was cut.

        Raises:
            BundleError: when the file is damaged.
        """
        path = self.folder / drafter.model.folder / PROPOSED_NAME
        model = drafter.model
        token_ids = _read_ids(path, model.geometry.logits_width, "logit", 0, model.vocab_size)
        if (token_ids[1:] <= token_ids[:-1]).any():
            raise BundleError(f"{path} has ids that do not ascend. Export the bundle again.")
        return token_ids

    def files_of(self, *folders: str) -> list[FileEntry]:
        """The files of some of its folders, as the manifest has them."""
        below = tuple(f"{folder}/" for folder in folders)
        return [entry for entry in self.manifest.files if entry.path.startswith(below)]

    def size_of(self, folder: str) -> int:
        """Bytes of the files of one of its folders."""
        return sum(entry.size for entry in self.files_of(folder))

    def sha256_of(self, folder: str) -> str:
        """One hash for the files of one of its folders, from those in the manifest."""
        lines = sorted(f"{entry.path.removeprefix(folder)} {entry.sha256}\n" for entry in self.files_of(folder))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_hashes(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every file again and compare its sha256 with the manifest.

        `progress` is called with the number of bytes read since the last call.

        Raises:
            BundleError: with the first file that differs, or cannot be read.
        """
        for entry in self.manifest.files:
            self.check_hash(entry, progress)

    def check_hash(self, entry: FileEntry, progress: Callable[[int], None] | None = None) -> None:
        """The same for one file."""
        path = self.folder / entry.path
        with reading(str(path), _AGAIN, BundleError):
            sha256 = sha256_of(path, progress)
        if sha256 != entry.sha256:
            raise BundleError(
                f"{path} is not the file that was exported: its sha256 differs from {MANIFEST_NAME}. Restore it, or "
                "export the bundle again."
            )


def check_no_draft(bundle: Path, draft: str | Path | None) -> None:
    """Raise OptionError if a draft model is named for a bundle, which has those that it was made with."""
    if draft not in (None, "auto"):
        raise OptionError(
            f"draft={shown(draft)!r} is for models, and {bundle} is a bundle already. Add the draft model to it: "
            f"outrider add {bundle} {shown(draft)}"
        )


def as_folder(name: str | Path) -> Path:
    """The path of this name, at which there need not be a folder.

    Raises:
        BundleError: when none can have it.
    """
    try:
        folder = Path(name).expanduser()
        folder.is_dir()
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # too long, no such user, or no text
        raise BundleError(
            f"{shown(name)!r} is not a folder's name: {why(error)}. Name one that 'outrider export' wrote."
        ) from error
    if "\0" in str(folder):
        raise BundleError(f"{shown(folder)!r} is not a folder's name: none has a null character. Take it out.")
    return folder


def read_bundle(folder: str | Path) -> Bundle:
    """Open a bundle: read its manifest, and check that its parts exist, are complete and fit together.

    Raises:
        BundleError: with the folder, file or field, and the next step.
    """
    folder = as_folder(folder)
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise BundleError(f"There is no folder {folder}. Make a bundle with 'outrider export MODEL -o {folder}'.")
    if not path.is_file():
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_NAME}. Name the folder that 'outrider "
            "export' wrote, or a model: a checkpoint folder with config.json, a .gguf file or a hub id."
        )
    with reading(str(path), _AGAIN, BundleError):
        raw = path.read_bytes()
        check_json(raw)
        header = msgspec.json.decode(raw)
    if isinstance(header, dict):  # check for a newer schema first: its fields may differ
        _check_version(path, header.get("schema_version"), header.get("minimum_runtime"))
        try:
            check_seal(header)  # bundles of earlier versions have no checksum
        except ValueError as error:
            remedy = "Restore it, or export the bundle again; if you have changed it yourself, take out its 'checksum'"
            raise BundleError(f"{path} is damaged: {why(error)}. {remedy}.") from error
        header.pop("checksum", None)
    try:
        manifest = msgspec.json.decode(msgspec.json.encode(header), type=Manifest)
    except FAULTS as error:
        raise BundleError(f"{path} is damaged: {why(error)}. {_AGAIN}") from error
    bundle = Bundle(folder, manifest)
    _check_files(bundle)
    check_fit(manifest)
    return bundle


def draft_models_of(bundle: Bundle, of: Bundle) -> tuple[DrafterEntry, ...]:
    """The draft models of a bundle, for the main model of the bundle `of`, which may be another.

    For a bundle without draft models: its main model.

    Raises:
        BundleError: when the two main models have different vocabularies.
    """
    if bundle is of:
        return bundle.manifest.drafters
    main = bundle.manifest.main
    if (main.vocab_sha256, main.vocab_size) != (of.manifest.main.vocab_sha256, of.manifest.main.vocab_size):
        raise BundleError(
            f"The main models of {bundle.folder} and {of.folder} have different vocabularies, so draft models of one "
            "cannot draft for the other. Export the pair together."
        )
    others = tuple(each for each in bundle.manifest.drafters if not each.traits.uses_main_cache)
    return others or (DrafterEntry("draft", "draft_model", main),)


def _read_ids(path: Path, length: int, of_each: str, lowest: int, end: int) -> NDArray[np.int32]:
    """int32 [length] from `lowest` to below `end`, an id for each of something."""
    import numpy as np

    with reading(str(path), _AGAIN, BundleError):
        content = path.read_bytes()
        file = io.BytesIO(content)
        try:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        except (SyntaxError, TokenError, ValueError) as error:  # NumPy reads the header as Python
            raise ValueError("its header is damaged") from error
        if dtype != np.int32 or shape != (length,):
            raise BundleError(
                f"{path} is {dtype} {list(shape)} and has to be int32 [{length}], an id for each {of_each}. {_AGAIN}"
            )
        ids = np.frombuffer(content, np.int32, length, file.tell())
    if ids.min() < lowest or ids.max() >= end:
        raise BundleError(
            f"{path} has ids from {ids.min()} to {ids.max():,}; they go from {'−1' if lowest else 0} to {end - 1:,}. "
            "Export the bundle again."
        )
    return ids


def _check_version(path: Path, schema: object, minimum: object) -> None:
    newer = isinstance(schema, int) and schema > SCHEMA_VERSION
    if isinstance(minimum, str) and re.fullmatch(VERSION, minimum):
        newer |= _version(minimum) > _version(__version__)
    if newer:
        raise BundleError(
            f"{path} was written for outrider {minimum} or later and this is {__version__}. "
            "Upgrade with 'pip install --upgrade outrider'."
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _check_files(bundle: Bundle) -> None:
    """Check that all files exist with their sizes, and the hashes of all but the models' weights."""
    manifest = bundle.manifest
    models = [manifest.main, *(drafter.model for drafter in manifest.drafters)]
    folders = {(model.folder, model.format) for model in models}
    folders |= {(model.encoder.folder, model.format) for model in models if model.encoder}
    weights = {f"{folder}/{WEIGHTS_NAMES[form]}" for folder, form in folders}
    if manifest.main.vision is not None:
        weights.add(f"{manifest.main.vision.folder}/{WEIGHTS_NAMES['openvino']}")
    for entry in manifest.files:
        relative = PurePosixPath(entry.path)
        if relative.is_absolute() or ".." in relative.parts or "\\" in entry.path or ":" in entry.path:
            raise BundleError(f"{MANIFEST_NAME} lists {entry.path!r}, which is not inside {bundle.folder}.")
        path = bundle.folder / entry.path
        with reading(str(path), _AGAIN, BundleError):
            if not path.is_file():
                raise BundleError(f"{shown(path)} is missing. Export the bundle again.")
            size = path.stat().st_size
        if size != entry.size:
            raise BundleError(f"{path} has {size:,} bytes instead of {entry.size:,}. Export the bundle again.")
        if size <= _HASHED_BYTES and entry.path not in weights:
            bundle.check_hash(entry)
