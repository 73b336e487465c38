"""Merges an adapter into a model before it is converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError

if TYPE_CHECKING:
    from outrider_export.adapters.peft_format import LoraAdapter


def merge(model: Any, adapter: LoraAdapter) -> None:
    """Add an adapter's changes to the weights of a torch model, in float32; as PEFT's `safe_merge`.

    Raises:
        ExportError: when the model has no such module, or one of another shape; then nothing was changed.
    """
    import torch

    modules = dict(model.named_modules())
    tied = model.get_output_embeddings()
    if tied is not None and tied.weight is not model.get_input_embeddings().weight:
        tied = None
    wanted = f"Name an adapter that was trained for this model{f', not for {adapter.base}' if adapter.base else ''}."
    for name, change in adapter.modules.items():
        module = modules.get(name)
        if module is None:
            raise ExportError(f"The adapter {adapter.id} changes {name}, which the model does not have. {wanted}")
        if not isinstance(module, torch.nn.Linear) or module is tied:
            kind = "shares its weights with the embedding" if module is tied else f"is a {type(module).__name__}"
            raise ExportError(
                f"The adapter {adapter.id} changes {name}, which {kind}. Only linear layers of their own are merged."
            )
        shape = (change.up.shape[0], change.down.shape[1])
        if tuple(module.weight.shape) != shape:
            raise ExportError(
                f"The adapter {adapter.id} changes {name} by {[*shape]} weights, and the model has "
                f"{[*module.weight.shape]} there. {wanted}"
            )
    with torch.no_grad():
        for name, change in adapter.modules.items():
            weight = modules[name].weight
            added = torch.from_numpy(change.up) @ torch.from_numpy(change.down) * change.scale
            weight.copy_((weight.float() + added).to(weight.dtype))
