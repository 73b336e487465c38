"""Compares a bundle's model with the checkpoint that it came from."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from outrider.bundle.folder import Bundle, draft_models_of, read_bundle
from outrider.config import Config
from outrider.errors import ExportError, OptionError, nearest
from outrider_export.child import run_child
from outrider_export.extras import check_extra
from outrider_export.progress import ForModel, Progress, Silent
from outrider_export.sources.source import Located, fetch, locate


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The cosine between a bundle's logits and the checkpoint's in float32, over the rows of all texts."""

    checkpoint: str  # its name
    setting: str  # device and precision of the bundle's model
    num_rows: int
    median: float
    first_percentile: float
    minimum: float
    top1_agreement: float  # the share of rows whose likeliest token is the same


def compare_with_checkpoint(
    bundle: Bundle,
    role: str,
    checkpoint: str | Path | Located,
    texts: Sequence[Sequence[int]],
    config: Config,
    *,
    progress: Progress | None = None,
) -> Fidelity:
    """Compare the logits for every token of `texts`, token ids of the bundle.

    role: "main" or the name of a drafter that has the main model's vocabulary. checkpoint: a folder, a GGUF file or a
    hub id, or the result of `fetch_checkpoint`. `progress` advances by one per text.

    Raises:
        OptionError: for a missing role, or one with its own vocabulary.
        ExportError: when the checkpoint cannot be read, is another model's, or the export extra is missing.
    """
    holder = find_holder(bundle, role, config)
    told = progress or Silent()
    device = config.device.main_device if role == "main" else config.device.draft_device or config.device.main_device
    source = checkpoint if isinstance(checkpoint, Located) else fetch_checkpoint(role, checkpoint, told)
    with tempfile.TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=True) as scratch:
        job = {
            "bundle": str(holder.folder),
            "role": role,
            "scheduler": asdict(config.scheduler) | {"answer_store": None},
            "device": asdict(config.device.of(role)) | {"main_device": device, "draft_bundle": None},
            "model": str(source.fetched.absolute()),
            "gguf": source.kind == "gguf",
            "scratch": scratch,
            "trust_remote_code": False,
            "texts": [list(token_ids) for token_ids in texts],
        }
        what = f"The {role} model cannot be compared with {source.id}"
        done = run_child("outrider_export.with_torch.compare.compare", job, what, told)
    cosines = np.concatenate(done["cosines"])
    if not np.isfinite(cosines).all():
        raise ExportError(f"{what}: {int((~np.isfinite(cosines)).sum()):,} rows have logits that are no numbers.")
    return Fidelity(
        checkpoint=source.id,
        setting=done["setting"],
        num_rows=len(cosines),
        median=float(np.median(cosines)),
        first_percentile=float(np.percentile(cosines, 1)),
        minimum=float(cosines.min()),
        top1_agreement=float(np.concatenate(done["top"]).mean()),
    )


def fetch_checkpoint(role: str, checkpoint: str | Path, progress: Progress | None = None) -> Located:
    """Locate a checkpoint to compare a model with, and download it if necessary.

    Raises:
        OptionError: if it is neither a path nor a hub id.
        ExportError: if it does not exist, or the export extra is missing.
    """
    check_extra(f"Comparing with {checkpoint}", "openvino")
    source = fetch(locate(checkpoint), False, ForModel(progress or Silent(), role))
    if source.kind != "gguf" and not (source.fetched / "config.json").is_file():
        raise ExportError(f"{source.path} is not a checkpoint: it has no config.json. Name the folder that has it.")
    return source


def find_holder(bundle: Bundle, role: str, config: Config) -> Bundle:
    """The bundle that has the model for `role`: this one, or the one that `config` takes its draft models from.

    Raises:
        OptionError: if there is none, or it does not read the main model's tokens.
        BundleError: if the bundle of the draft models cannot be read, or does not fit.
    """
    if role == "main":
        return bundle
    other = config.device.draft_bundle
    holder = bundle if other is None else read_bundle(other)
    drafters = {drafter.name: drafter for drafter in draft_models_of(holder, bundle)}
    if role not in drafters:
        raise OptionError(f"{holder.folder} has no model '{role}'. {nearest(role, ['main', *drafters])}")
    if drafters[role].vocabulary != "same":
        raise OptionError(
            f"The model '{role}' has a vocabulary of its own, so it cannot read the main model's text. Export it "
            "alone, and verify that bundle."
        )
    return holder
