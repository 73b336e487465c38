"""The bundle: a folder with a main model, its drafters, a tokenizer and `outrider.json`, which describes them.

::

    my-pair/
      outrider.json        the manifest, as `Manifest` below
      main/                openvino_model.xml and .bin, or model.onnx and model.onnx.data: each model has its format
      draft/               the same; further drafters have folders of their own
      tokenizer/           openvino_tokenizer and openvino_detokenizer (.xml, .bin), tokenizer.json

A model in ONNX is a decoder as onnxruntime-genai's model builder writes it, with more inputs, int64 [1] each, which may
be left out: `rows_begin` and `rows_end`, between which logits are made, and perhaps `extra_rows`, zeros that attention
alone sees behind the tokens.

For a drafter whose vocabulary is another, `DrafterEntry.vocabulary` says how it drafts all the same, and there are::

      draft/to_main.npy                      int32 [draft vocab]: the main id of the same token, or −1
      draft-tokenizer/                       the draft model's own, as tokenizer/
      tokenizer/token_bytes.msgpack          for each id the bytes that it stands for; the same in draft-tokenizer/

For a drafter that proposes some of its tokens only, because its output matrix was cut, there is::

      draft/proposed.npy                     int32 [logits width], ascending: the draft id of each of its logits

`read_bundle` refuses a folder whose parts are missing, damaged, cut short or do not fit, and says which. Of the models'
weights it compares sizes only; `Bundle.check_hashes` reads every byte.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from outrider import __version__
from outrider.errors import BundleError
from outrider.files import FAULTS, reading, shown, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

MANIFEST_NAME = "outrider.json"
MAP_NAME = "to_main.npy"
PROPOSED_NAME = "proposed.npy"
BYTES_NAME = "token_bytes.msgpack"
# By format: the file that a backend opens, then those that belong to it.
MODEL_NAMES: dict[Format, tuple[str, ...]] = {
    "openvino": ("openvino_model.xml", "openvino_model.bin"),
    "onnx": ("model.onnx",),
}
# Only the sizes of weights, where other bytes make other numbers, and of larger files than this are compared. All else
# is read at every start, as other bytes in a tokenizer's files take the process down: 22 MB of a Qwen2.5 pair take
# 27 ms.
WEIGHTS_NAMES: dict[Format, str] = {"openvino": "openvino_model.bin", "onnx": "model.onnx.data"}
_HASHED_BYTES = 64 << 20
SCHEMA_VERSION = 1
RESERVED_NAMES = ("main", "auto", "ngram", "suffix", "none")  # these mean something else than a drafter of the bundle

_VERSION = r"^\d{1,9}(\.\d{1,9})*$"

_AGAIN = "Export the bundle again."

Format: TypeAlias = Literal["openvino", "onnx"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the runtime needs to know of a model's shape before it compiles it."""

    architecture: str  # "llama", "qwen2", … as in config.json's model_type or GGUF's general.architecture
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_size: Positive
    hidden_size: Positive
    context_length: Positive  # tokens the model was trained to attend to
    logits_width: Positive  # of the output matrix: ≥ the vocabulary where it is padded, < where it was cut


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a model came from and how it was converted."""

    id: str  # hub id, or the name of the folder or file (never a full path)
    kind: str  # "hub", "folder" or "gguf"; "onnx" where the model was in ONNX already
    revision: str | None = None  # resolved commit of a hub id
    sha256: Sha256 | None = None  # of a GGUF file
    recipe: dict[str, str] = {}  # route and the versions of the packages that converted it


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of the bundle."""

    folder: Name
    format: Format
    weights: str  # "int8", "int4", "fp16", "fp32", or GGUF's own, such as "Q4_1"
    geometry: Geometry
    vocab_size: Positive  # real tokens; logits at and above this id are masked
    vocab_sha256: Sha256
    source: Source


class DrafterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named drafter that needs files. Drafters without files (n-gram, suffix) are always available."""

    name: Name
    kind: Literal["draft_model"]
    model: ModelEntry
    # The main model's vocabulary, the tokens that both have (`outrider.drafters.Intersection`), or by way of their text
    # (`outrider.drafters.Text`).
    vocabulary: Literal["same", "intersection", "text"] = "same"
    num_shared_tokens: Positive | None = None  # draft tokens that the main model has, too; None: all
    tokenizer: TokenizerEntry | None = None  # where the vocabulary is not the same
    num_proposed_tokens: Positive | None = None  # draft tokens that its output matrix was cut to; None: all


class TokenizerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer of the main model and of all drafters that bring none."""

    folder: Name
    eos_token_ids: tuple[NonNegative, ...]  # every id that ends an answer
    special_token_ids: tuple[NonNegative, ...] = ()
    bos_token_id: NonNegative | None = None
    pad_token_id: NonNegative | None = None
    chat_template: bool = False  # whether the tokenizer carries one


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file below the bundle's folder, with forward slashes."""

    path: str
    size: NonNegative
    sha256: Sha256


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `outrider.json`."""

    schema_version: Positive
    minimum_runtime: Annotated[str, msgspec.Meta(pattern=_VERSION)]
    created_by: str
    main: ModelEntry
    drafters: tuple[DrafterEntry, ...]
    tokenizer: TokenizerEntry
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Bundle:
    """A bundle's folder and its manifest."""

    folder: Path
    manifest: Manifest

    def model_path(self, model: ModelEntry) -> Path:
        """The file that the backend of `model.format` opens."""
        return self.folder / model.folder / MODEL_NAMES[model.format][0]

    @property
    def tokenizer_path(self) -> Path:
        """The folder of the tokenizer."""
        return self.folder / self.manifest.tokenizer.folder

    def read_token_bytes(self, tokenizer: TokenizerEntry, vocab_size: int) -> list[bytes]:
        """For each token id the bytes that it stands for, a special token's those of its name.

        Raises:
            BundleError: when the file does not hold them for `vocab_size` tokens.
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
            BundleError: when the file does not hold a map between the two vocabularies.
        """
        path = self.folder / drafter.model.folder / MAP_NAME
        to_main = _read_ids(path, drafter.model.vocab_size, "draft token", -1, self.manifest.main.vocab_size)
        if to_main.max() < 0:
            raise BundleError(f"{path} shares no token, so nothing could be drafted. Export the bundle again.")
        return to_main

    def read_proposed(self, drafter: DrafterEntry) -> NDArray[np.int32]:
        """int32 [logits width], ascending: the draft id of each logit of a drafter whose output matrix was cut.

        Raises:
            BundleError: when the file does not hold them.
        """
        path = self.folder / drafter.model.folder / PROPOSED_NAME
        model = drafter.model
        token_ids = _read_ids(path, model.geometry.logits_width, "logit", 0, model.vocab_size)
        if (token_ids[1:] <= token_ids[:-1]).any():
            raise BundleError(f"{path} has ids that do not ascend. Export the bundle again.")
        return token_ids

    def check_hashes(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every file again and compare its sha256 with the manifest.

        `progress` is called with the number of bytes read since the last call.

        Raises:
            BundleError: naming the first file that differs.
        """
        for entry in self.manifest.files:
            self.check_hash(entry, progress)

    def check_hash(self, entry: FileEntry, progress: Callable[[int], None] | None = None) -> None:
        """The same for one file.

        Raises:
            BundleError: when it differs, or cannot be read.
        """
        path = self.folder / entry.path
        with reading(str(path), _AGAIN, BundleError):
            sha256 = sha256_of(path, progress)
        if sha256 != entry.sha256:
            raise BundleError(
                f"{path} is not the file that was exported: its sha256 differs from {MANIFEST_NAME}. Restore it, or "
                "export the bundle again."
            )


def read_bundle(folder: str | Path) -> Bundle:
    """Open a bundle: read its manifest and check that its parts are there, whole and fit together.

    Raises:
        BundleError: naming the folder, file or field, and what to do.
    """
    try:
        folder = Path(folder).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # too long, no such user, no text
        raise BundleError(
            f"{shown(folder)!r} is not a folder's name: {why(error)}. Name one that 'outrider export' wrote."
        ) from error
    if "\0" in str(folder):
        raise BundleError(f"{shown(folder)!r} is not a folder's name: none has a null character. Take it out.")
    path = folder / MANIFEST_NAME
    if not is_folder:
        raise BundleError(f"There is no folder {folder}. Make a bundle with 'outrider export MODEL -o {folder}'.")
    if not path.is_file():
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST_NAME}. Make one with 'outrider export'.")
    with reading(str(path), _AGAIN, BundleError):
        raw = path.read_bytes()
        header = msgspec.json.decode(raw)
    if isinstance(header, dict):  # a newer schema is told from a damaged file before its fields are judged
        _check_version(path, header.get("schema_version"), header.get("minimum_runtime"))
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except FAULTS as error:
        raise BundleError(f"{path} is damaged: {why(error)}. {_AGAIN}") from error
    bundle = Bundle(folder, manifest)
    _check_files(bundle)
    _check_fit(bundle)
    return bundle


def draft_models_of(bundle: Bundle, of: Bundle) -> tuple[DrafterEntry, ...]:
    """The draft models of a bundle, for the main model of the bundle `of`, which may be another.

    A bundle without any gives its main model.

    Raises:
        BundleError: when the two main models have different vocabularies.
    """
    if bundle is of:
        return bundle.manifest.drafters
    main = bundle.manifest.main
    if (main.vocab_sha256, main.vocab_size) != (of.manifest.main.vocab_sha256, of.manifest.main.vocab_size):
        raise BundleError(
            f"The main models of {bundle.folder} and {of.folder} have different vocabularies, so the draft models of "
            "the one cannot draft for the other. Export the pair together."
        )
    return bundle.manifest.drafters or (DrafterEntry("draft", "draft_model", main),)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `outrider.json` into `folder`, which holds everything that the manifest lists."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST_NAME).write_bytes(text + b"\n")


def list_files(folder: Path, progress: Callable[[int], None] | None = None) -> tuple[FileEntry, ...]:
    """Size and sha256 of every file below `folder`, the manifest excepted, sorted by path."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST_NAME)
    return tuple(FileEntry(p.relative_to(folder).as_posix(), p.stat().st_size, sha256_of(p, progress)) for p in paths)


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file, read in pieces; `progress` is called with each piece's length in bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def vocabulary_sha256(tokens: Iterable[str]) -> str:
    """One hash for a vocabulary: the token strings in id order, byte-level pieces in their raw spelling."""
    return hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass")).hexdigest()


def _read_ids(path: Path, length: int, of_each: str, lowest: int, end: int) -> NDArray[np.int32]:
    """int32 [length] from `lowest` to below `end`, an id for each of something."""
    import numpy as np

    with reading(str(path), _AGAIN, BundleError), path.open("rb") as file:
        ids: NDArray[np.int32] = np.lib.format.read_array(file, allow_pickle=False)
    if ids.dtype != np.int32 or ids.shape != (length,):
        raise BundleError(
            f"{path} is {ids.dtype} {list(ids.shape)} and has to be int32 [{length}], an id for each {of_each}. "
            "Export the bundle again."
        )
    if ids.min() < lowest or ids.max() >= end:
        raise BundleError(
            f"{path} has ids from {ids.min()} to {ids.max():,}; they go from {'−1' if lowest else 0} to {end - 1:,}. "
            "Export the bundle again."
        )
    return ids


def _check_version(path: Path, schema: object, minimum: object) -> None:
    newer = isinstance(schema, int) and schema > SCHEMA_VERSION
    if isinstance(minimum, str) and re.fullmatch(_VERSION, minimum):
        newer |= _version(minimum) > _version(__version__)
    if newer:
        raise BundleError(
            f"{path} was written for outrider {minimum} or later and this is {__version__}. "
            "Upgrade with 'pip install --upgrade outrider'."
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _check_files(bundle: Bundle) -> None:
    """Whether all files are there, in their sizes; and what is in them, but for the models' weights."""
    manifest = bundle.manifest
    models = [manifest.main, *(drafter.model for drafter in manifest.drafters)]
    weights = {f"{model.folder}/{WEIGHTS_NAMES[model.format]}" for model in models}
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


def _check_fit(bundle: Bundle) -> None:
    """Whether the manifest's parts fit one another and the folders they name."""
    manifest = bundle.manifest
    listed = {entry.path for entry in manifest.files}
    names = [drafter.name for drafter in manifest.drafters]
    if len({*names, *RESERVED_NAMES}) != len(names) + len(RESERVED_NAMES):
        raise BundleError(
            f"{MANIFEST_NAME} names its drafters {', '.join(names)}: names must differ from one another and from "
            f"{', '.join(RESERVED_NAMES)}."
        )
    cut = {drafter.name for drafter in manifest.drafters if drafter.num_proposed_tokens}
    for role, model in [("main", manifest.main), *((d.name, d.model) for d in manifest.drafters)]:
        for name in MODEL_NAMES[model.format]:
            if f"{model.folder}/{name}" not in listed:
                raise BundleError(f"{MANIFEST_NAME} lists no {model.folder}/{name} for the {role} model.")
        if model.vocab_size > model.geometry.logits_width and role not in cut:
            raise BundleError(
                f"The {role} model gives {model.geometry.logits_width:,} logits for {model.vocab_size:,} tokens; "
                f"{MANIFEST_NAME} is damaged. Export the bundle again."
            )
    for drafter in manifest.drafters:
        _check_vocabulary(manifest, drafter, listed)
        _check_proposed(drafter, listed)
    for token_id in manifest.tokenizer.eos_token_ids:
        if token_id >= manifest.main.vocab_size:
            raise BundleError(f"eos_token_id {token_id} is outside the vocabulary of {manifest.main.vocab_size:,}.")


def _check_vocabulary(manifest: Manifest, drafter: DrafterEntry, listed: set[str]) -> None:
    """Whether there is what the drafter's way to the main model's vocabulary takes."""
    main, model, tokenizer = manifest.main, drafter.model, drafter.tokenizer
    if drafter.vocabulary == "same":
        if model.vocab_sha256 != main.vocab_sha256 or model.vocab_size != main.vocab_size:
            raise BundleError(
                f"The vocabulary of drafter '{drafter.name}' is not the main model's, so it cannot draft for it. "
                "Export the pair again."
            )
        return
    if tokenizer is None:
        raise BundleError(
            f"{MANIFEST_NAME} has no tokenizer for drafter '{drafter.name}', whose vocabulary is not the main model's. "
            "Export the pair again."
        )
    own = f"{model.folder}/{MAP_NAME}" if drafter.vocabulary == "intersection" else f"{tokenizer.folder}/{BYTES_NAME}"
    needed = {own, f"{manifest.tokenizer.folder}/{BYTES_NAME}"}
    if missing := sorted(needed - listed):
        raise BundleError(
            f"{MANIFEST_NAME} lists no {missing[0]}, which drafter '{drafter.name}' needs. Export the pair again."
        )


def _check_proposed(drafter: DrafterEntry, listed: set[str]) -> None:
    """Whether a drafter whose output matrix was cut says which tokens are left."""
    model, count = drafter.model, drafter.num_proposed_tokens
    if count is None:
        return
    if count != model.geometry.logits_width:
        raise BundleError(
            f"Drafter '{drafter.name}' proposes {count:,} tokens and gives {model.geometry.logits_width:,} logits; "
            f"{MANIFEST_NAME} is damaged. Export the pair again."
        )
    if (path := f"{model.folder}/{PROPOSED_NAME}") not in listed:
        raise BundleError(
            f"{MANIFEST_NAME} lists no {path}, which drafter '{drafter.name}' needs. Export the pair again."
        )
