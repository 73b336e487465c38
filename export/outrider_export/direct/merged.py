"""Merges a LoRA adapter into a model's weights while they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import ExportError
from outrider_export.direct.weights import EMBEDDING, HEAD, Stored, Weights, place_of

if TYPE_CHECKING:
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
        wanted = (
            f"Name an adapter that was trained for this model{f', not for {adapter.base}' if adapter.base else ''}."
        )
        for name, change in adapter.modules.items():
            module = None if "norm" in name.rsplit(".", 1)[-1] else weights.stored(f"{name}.weight")
            if module is None:
                raise ExportError(f"The adapter {adapter.id} changes {name}, which the model does not have. {wanted}")
            if name == EMBEDDING or (name == HEAD and self.decoder.tied):
                kind = "shares its weights with the embedding" if name == HEAD else "is an Embedding"
                raise ExportError(
                    f"The adapter {adapter.id} changes {name}, which {kind}. Only linear layers of their own are "
                    "merged."
                )
            shape = (change.up.shape[0], change.down.shape[1])
            if module.shape != shape:
                raise ExportError(
                    f"The adapter {adapter.id} changes {name} by {[*shape]} weights, and the model has "
                    f"{[*module.shape]} there. {wanted}"
                )

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
