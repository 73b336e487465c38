"""A bundle's draft model as an engine of its own, which writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.bundle.folder import read_bundle
from outrider.config.files import load_config
from outrider.engine.engine import Engine
from outrider.errors import OptionError, nearest

if TYPE_CHECKING:
    from pathlib import Path


def draft_engine(bundle: str | Path, name: str = "draft", **options: Any) -> Engine:
    """An engine whose main model is the draft model `name` of a bundle. options: as those of `outrider.load`.

    Raises:
        OptionError: when there is no such draft model, or it cannot write: its output matrix is cut.
        BundleError, DeviceError: as `outrider.load`.
    """
    found = read_bundle(bundle)
    models = {each.name: each for each in found.manifest.drafters if each.kind == "draft_model"}
    if name not in models:
        raise OptionError(f"The bundle has no draft model {name!r}. {nearest(name, models)}")
    entry = models[name]
    if entry.num_proposed_tokens is not None:
        raise OptionError(
            f"The draft model {name!r} proposes {entry.num_proposed_tokens:,} of {entry.model.vocab_size:,} tokens, so "
            "it cannot write everything. Export the bundle with --draft-vocab all."
        )
    tokenizer = entry.tokenizer or found.manifest.tokenizer
    manifest = msgspec.structs.replace(found.manifest, main=entry.model, drafters=(), tokenizer=tokenizer)
    return Engine(replace(found, manifest=manifest), load_config(None).replace(**options))
