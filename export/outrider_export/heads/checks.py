"""Whether a drafter's checkpoint, the main model and the options go together."""

from __future__ import annotations

from collections.abc import Container

from outrider.errors import ExportError, OptionError
from outrider.models.backends.taps import after_layers
from outrider_export.heads.formats import HeadCheckpoint


def check_draft_vocab(head: HeadCheckpoint, *asked: object) -> None:
    """Check that a choice of tokens is for a drafter whose output matrix is cut. asked: its options; None without.

    Raises:
        OptionError: for a drafter without a part of the main model's output matrix.
    """
    if not head.uses_main_matrix and any(each is not None for each in asked):
        raise OptionError(
            f"draft_vocab is for drafters with a part of the main model's output matrix, and this {head.kind} drafter "
            "has none. Leave it out."
        )


def check_features(head: HeadCheckpoint, found: Container[str], num_layers: int) -> None:
    """Check that the main model has the hidden states that a drafter reads. found: the names of those it has.

    Raises:
        ExportError: with the first that is missing.
    """
    if missing := [each for each in head.features if each not in found]:
        first, last = after_layers(0), after_layers(num_layers)
        has = f"{first} to {last}. Name the main model that the drafter was trained for."
        if first not in found:
            has = "none in a form that is known. Export the main model from its checkpoint."
        raise ExportError(f"The drafter reads hidden states {missing[0]!r}, and the main model's graph has {has}")
