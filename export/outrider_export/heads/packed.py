"""A drafter as it is in a bundle, in a folder of its own: for other bundles of its main model, without torch.

    pack(read_bundle("my-bundle"), "eagle3", Path("my-drafter"))
    add_drafter("another-bundle", "my-drafter")

The folder has the drafter's files and drafter.json, which says for which main model it is.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outrider.bundle import Bundle
from outrider.bundle.hashes import list_files, sha256_of
from outrider.bundle.manifest import DrafterEntry, FileEntry, Geometry, ModelEntry, Sha256
from outrider.errors import ExportError, OptionError, nearest
from outrider.system.files import reading, write_whole
from outrider_export.heads.write import check_drafter
from outrider_export.target import Target

PACKED_NAME = "drafter.json"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of drafter.json. main: the shape of its main model."""

    entry: DrafterEntry
    main: Geometry
    vocab_sha256: Sha256
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class PackedDrafter:
    """A folder with such a drafter."""

    folder: Path
    content: _Content

    @property
    def kind(self) -> str:
        """The drafter's."""
        return self.content.entry.kind

    def check_options(self, weights: str | None, *draft_vocab: object) -> None:
        """Check options of a conversion, which was done.

        Raises:
            OptionError: when they ask for another one.
        """
        if weights not in (None, self.content.entry.model.weights):
            raise OptionError(
                f"weights={weights!r} cannot be had of {self.folder}, whose weights are in "
                f"{self.content.entry.model.weights}. Add the drafter's checkpoint."
            )
        if any(each is not None for each in draft_vocab):
            raise OptionError(f"draft_vocab cannot be chosen for {self.folder}, which is converted. Leave it out.")

    def write(self, target: Target, main: ModelEntry, name: str) -> DrafterEntry:
        """Copy it into the new bundle under this name, and describe it.

        Raises:
            ExportError: when a file is damaged, or the main model's graph does not have the hidden states.
        """
        folder = target.new
        (folder / name).mkdir()
        for file in self.content.files:
            path = self.folder / file.path
            if not path.is_file() or sha256_of(path) != file.sha256:
                raise ExportError(f"{path} is damaged: its sha256 is not that in {PACKED_NAME}. Fetch it again.")
            shutil.copyfile(path, folder / name / file.path)
        entry = self.content.entry
        entry = msgspec.structs.replace(entry, name=name, model=msgspec.structs.replace(entry.model, folder=name))
        check_drafter(folder, main, entry)
        return entry


def pack(bundle: Bundle, name: str, folder: Path) -> Path:
    """Write a bundle's drafter into a folder of its own, which is made.

    Raises:
        OptionError: when the bundle has no such drafter, or the drafter is a whole model or part of the main model.
        ExportError: when the folder cannot be written.
    """
    manifest = bundle.manifest
    entry = next((each for each in manifest.drafters if each.name == name), None)
    if entry is None:
        names = [each.name for each in manifest.drafters]
        raise OptionError(f"The bundle has no drafter {name!r}. {nearest(name, names)}")
    if not entry.traits.reads_states:
        raise OptionError(f"The drafter {name!r} is of kind {entry.kind}, which cannot be packed. Copy the bundle.")
    try:
        shutil.copytree(bundle.folder / entry.model.folder, folder)
        main = manifest.main
        content = _Content(entry, main.geometry, main.vocab_sha256, tuple(list_files(folder)))
        write_whole(folder / PACKED_NAME, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise ExportError(f"{folder} cannot be written: {error}. Choose another folder.") from error
    return folder


def is_packed(folder: Path) -> bool:
    """Whether a folder has a packed drafter."""
    return (folder / PACKED_NAME).is_file()


def read_packed(folder: Path, main: ModelEntry) -> PackedDrafter:
    """The packed drafter in a folder, for this main model.

    Raises:
        ExportError: when it is damaged, or for another main model.
    """
    path = folder / PACKED_NAME
    with reading(str(path), "Fetch it again.", ExportError):
        content = msgspec.json.decode(path.read_bytes(), type=_Content)
    if main.format != "openvino":
        raise ExportError(
            f"{folder} is for a main model in OpenVINO's format, and this one is in {main.format}. Add the drafter's "
            "checkpoint."
        )
    if _read_by_drafters(content.main, content.vocab_sha256) != _read_by_drafters(main.geometry, main.vocab_sha256):
        raise ExportError(
            f"{folder} is for another main model, of architecture {content.main.architecture}, with "
            f"{content.main.num_layers} layers of {content.main.hidden_size:,} and a vocabulary of its own. Name the "
            "main model that it was trained for."
        )
    return PackedDrafter(folder, content)


def _read_by_drafters(main: Geometry, vocab_sha256: str) -> tuple[object, ...]:
    """What of a main model a drafter depends on, besides its weights."""
    return main.num_layers, main.hidden_size, vocab_sha256
