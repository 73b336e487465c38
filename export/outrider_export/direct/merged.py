"""Merges a LoRA adapter into a model's weights while they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider_export.adapters.peft_format import check_fits
from outrider_export.direct.weights import EMBEDDING, HEAD, Stored, Weights, place_of

if TYPE_CHECKING:
    from outrider.errors import ExportError
    from outrider_export.adapters.peft_format import LoraAdapter
    from outrider_export.direct.weights import Rows


class Merged(Weights):
    """The weights of a model with an adapter's changes added in float32, as PEFT's `safe_merge`.

    Raises:
        ExportError: when the model has no such module, or one of another shape.
    """

    def __init__(self, weights: Weights, adapter: LoraAdapter) -> None:
        super().__init__(weights.decoder, interleaved=False)  # an adapter's rows are in a checkpoint's order
        self._weights, self._changes = weights, adapter.modules
        check_fits(adapter, self._find)

    def _find(self, name: str) -> tuple[int, ...] | str | None:
        """See `check_fits`."""
        module = None if "norm" in name.rsplit(".", 1)[-1] else self._weights.stored(f"{name}.weight")
        if module is not None and name == EMBEDDING:
            return "is an Embedding"
        if module is not None and name == HEAD and self.decoder.tied:
            return "shares its weights with the embedding"
        return None if module is None else module.shape

    def stored(self, name: str) -> Stored | None:
        """See `Weights`."""
        return self._weights.stored(name)

    def missing(self, name: str) -> ExportError:
        """See `Weights`."""
        return self._weights.missing(name)

    def matrix(self, name: str) -> Stored:
        """See `Weights`, with what the adapter adds."""
        plain = self._weights.matrix(name)
        change = self._changes.get(place_of(name, self.decoder)[0])
        if change is None:
            return plain
        rows = self.rows_of(name, len(change.up))
        up = change.up if rows is None else change.up[rows]
        return Stored(
            plain.shape, plain.num_bytes, lambda part: plain.read(part) + up[part] @ change.down * change.scale
        )

    def vector(self, name: str) -> Rows | None:
        """See `Weights`."""
        return self._weights.vector(name)
