"""Hidden states: the error of backends that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import BundleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outrider.types import Chunk


class WithoutFeatures:
    """A step of a backend whose models have no output but logits. `Capabilities.features` is empty there."""

    __slots__ = ()

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """Raise: there are no hidden states.

        Raises:
            BundleError: always.
        """
        asked = ", ".join(repr(name) for name in chunk.features) or "any"
        raise BundleError(
            f"Hidden states were asked for ({asked}), and the model has no output but its logits. "
            "Use a drafter that needs none."
        )
