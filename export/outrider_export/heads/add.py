"""Adds a drafter that is no model of its own to a bundle: `outrider add`.

    bundle = add_drafter("my-bundle", "my-eagle3", name="eagle3")

The bundle is written anew, with links to the old one's files where the disk allows it, and then takes its place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from outrider import __version__
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import MANIFEST_NAME, NAME, RESERVED_NAMES, write_manifest
from outrider.errors import ExportError, OptionError
from outrider_export.diet import check_diet, choose_from
from outrider_export.heads.formats import check_draft_vocab, check_main, read_head
from outrider_export.heads.write import check_head_weights, write_head
from outrider_export.keep import link_or_copy
from outrider_export.plan import check_extra
from outrider_export.progress import Silent
from outrider_export.sources import fetch, locate
from outrider_export.target import Target
from outrider_export.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from outrider_export.progress import Progress


def add_drafter(
    bundle: str | Path,
    drafter: str | Path,
    *,
    name: str | None = None,
    weights: str = "int8",
    draft_vocab: int | str | None = None,
    draft_vocab_corpus: str | Path | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Add a drafter to a bundle in place. Nothing is changed if that fails.

    drafter: a checkpoint folder or hub id in one of the formats of `outrider_export.heads.formats`. name: by default
    its kind. draft_vocab: the number of tokens that it proposes with the main model's output matrix, or "all".

    Raises:
        OptionError: for an invalid option, or a name that is taken.
        BundleError: when the bundle cannot be read.
        ExportError: when the drafter is unknown, damaged or does not fit, or the bundle cannot be written.
    """
    progress = progress or Silent()
    check_head_weights("weights", weights)
    old = read_bundle(bundle)
    main = old.manifest.main
    if main.encoder is not None:
        raise ExportError(
            f"{old.folder} has an encoder-decoder model, and heads such as EAGLE draft for decoders only. Export it "
            "with a smaller model of its own kind as --draft."
        )
    check_extra("Adding a drafter", main.format)
    source = fetch(locate(drafter, revision), False, progress)
    if source.path is None or not source.path.is_dir():
        raise ExportError(f"{drafter} is not a checkpoint folder. Name the one with the drafter's config.json.")
    head = read_head(source.path, main.geometry)
    check_main(head, main.format)
    name = head.kind if name is None else name
    _check_name(name, old)
    if masks := [each.name for each in old.manifest.drafters if each.kind == head.kind == "masks"]:
        raise OptionError(
            f"The bundle has mask tokens already, as drafter {masks[0]!r}, and a main model reads one set. Add them to "
            "a bundle without any."
        )
    check_draft_vocab(head, draft_vocab, draft_vocab_corpus)
    tokens = None
    if head.uses_main_matrix:
        vocabulary = Vocabulary.of_folder(old.tokenizer_path)
        eos = old.manifest.tokenizer.eos_token_ids
        asked = check_diet(True, draft_vocab, draft_vocab_corpus)
        tokens = choose_from(vocabulary, eos, *asked, old.tokenizer_path, progress)
    try:
        with Target(old.folder, overwrite=True) as target:
            progress.phase("convert")
            for path in old.folder.rglob("*"):
                if path != old.folder / MANIFEST_NAME:  # what is written anew may be no link
                    _link(path, target.new / path.relative_to(old.folder))
            entry = write_head(target.new, main, head, name, weights, tokens, source)
            manifest = msgspec.structs.replace(
                old.manifest, drafters=(*old.manifest.drafters, entry), minimum_runtime=__version__
            )
            progress.phase("hash")
            write_manifest(target.new, msgspec.structs.replace(manifest, files=list_files(target.new)))
            read_bundle(target.new)
            target.commit()
    except OSError as error:
        raise ExportError(f"{old.folder} cannot be written: {error}.") from error
    return read_bundle(old.folder)


def _check_name(name: str, bundle: Bundle) -> None:
    """Raise OptionError unless a drafter of the bundle can be called `name`, and its folder, too."""
    taken = [each.name for each in bundle.manifest.drafters]
    if name in taken:
        raise OptionError(f"The bundle has a drafter {name!r} already ({', '.join(taken)}). Choose another name.")
    if not re.fullmatch(NAME, name):
        raise OptionError(f"name={name!r} is no name: it has to be letters, digits, '.', '_' and '-'. Choose another.")
    if name in RESERVED_NAMES or (bundle.folder / name).exists():
        raise OptionError(f"name={name!r} has another meaning, or is a folder of the bundle. Choose another name.")


def _link(old: Path, new: Path) -> None:
    """Link a file, or copy it where links are impossible. Make a folder."""
    if old.is_dir():
        new.mkdir(parents=True, exist_ok=True)
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(old, new)
