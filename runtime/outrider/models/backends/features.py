"""Hidden states: the errors of models that do not give them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from outrider.types import Chunk


NEXT_HIDDEN = "next_hidden"  # the hidden states that a module gives, to read them beside its next token
BLOCK_STATES = "block_states"  # what a block drafter's correction takes of its own hidden states


def check_features(names: Iterable[str], found: Container[str]) -> None:
    """Raise BundleError unless a main model has hidden states of these names."""
    if missing := [name for name in names if name not in found]:
        raise BundleError(
            f"A drafter needs the main model's hidden states {missing[0]!r}, which are not found in its graph. "
            "Load it with drafter='suffix', or without one."
        )


class WithoutFeatures:
    """A step of a backend whose models have no output but logits. `Capabilities.features` is empty there."""

    __slots__ = ()

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """Raise BundleError: there are no hidden states."""
        asked = ", ".join(repr(name) for name in chunk.features) or "any"
        raise BundleError(
            f"Hidden states were asked for ({asked}), and the model has no output but its logits. "
            "Use a drafter that needs none."
        )
