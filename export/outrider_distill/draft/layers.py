"""Which layers of a model to leave out.

    cut = choose_layers(model, batches, num_layers=8, token_ids=token_ids, tell=click.echo)
    cut_layers(model, cut.kept)

Shapes: B rows, T tokens, h hidden size, N answer tokens to predict.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ExportError, OptionError
from outrider_distill.train import places
from outrider_distill.train.places import Targets, kl_of_top

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider_distill.data import TrainingBatch

# Entries of a config that have one value a layer.
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


@dataclass(frozen=True)
class Cut:
    """The layers that stay, ascending, and what leaving out the others does to the model."""

    kept: tuple[int, ...]
    kl: float  # nats a token, from the main model's likeliest tokens

    def __str__(self) -> str:
        kept = ", ".join(map(str, self.kept))
        return f"layers that stay: {kept} (KL {self.kl:.3f})"


def choose_layers(
    model: Any,
    batches: Sequence[TrainingBatch],
    num_layers: int | None,
    *,
    token_ids: Any = None,
    tell: Callable[[str], None] = print,
) -> Cut:
    """The cut of `model` to `num_layers` layers, None for all, with least KL divergence from the main model.

    The search takes some four times the square of the model's number of layers, in passes of one layer.

    batches: some thousand answer tokens with the main model's likeliest ones. token_ids: int64 [n], ascending,
    those that the draft model is to propose; None for all.

    Raises:
        OptionError: if the model does not have more layers.
    """
    total = len(decoder_of(model).layers)
    if num_layers is None:
        return Cut(tuple(range(total)), 0.0)
    if not 0 < num_layers < total:
        raise OptionError(
            f"layers={num_layers} cannot be cut out of a model with {total}. Choose from 1 to {total - 1}."
        )
    model.eval()
    with torch.no_grad():
        walks = [Walk(model, batch, token_ids) for batch in batches]
        kept = by_search(walks, num_layers, tell)
        cut = Cut(kept, _mean_kl(walks, [_run(walk, kept, walk.states[0]) for walk in walks]))
    tell(str(cut))
    return cut


def cut_layers(model: Any, kept: Sequence[int]) -> None:
    """Leave all other layers out of a transformers model, and of its config."""
    decoder = decoder_of(model)
    decoder.layers = torch.nn.ModuleList([decoder.layers[i] for i in kept])
    for index, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = index  # its place in a cache
    config = model.config
    config.num_hidden_layers = len(kept)
    for name in _BY_LAYER:
        if values := getattr(config, name, None):
            setattr(config, name, [values[i] for i in kept])


def decoder_of(model: Any) -> Any:
    """The part of a transformers model that has `embed_tokens`, `layers` and `norm`.

    Raises:
        ExportError: for another layout.
    """
    decoder = model.base_model
    if not all(hasattr(decoder, name) for name in ("embed_tokens", "layers", "norm")):
        raise ExportError(
            f"No layers can be taken out of a {type(model).__name__}: it is not in the layout of Llama or Qwen. Choose "
            "another draft model with --from."
        )
    return decoder


def logits_of(model: Any, hidden: Any, token_ids: Any) -> Any:
    """Logits [N, V] of the tokens int64 [V], or of all for None, for what the output matrix reads, [N, h]."""
    matrix = model.get_output_embeddings()
    rows = slice(None) if token_ids is None else token_ids
    bias = None if matrix.bias is None else matrix.bias[rows]
    return torch.nn.functional.linear(hidden, matrix.weight[rows], bias)


def columns_of(model: Any, token_ids: Any) -> Any:
    """As `places.columns_of`, for a model's own vocabulary; None for all tokens."""
    count = len(model.get_output_embeddings().weight)
    return places.columns_of(torch.arange(count, device=model.device) if token_ids is None else token_ids, count)


class Walk:
    """A batch's way through a model's layers, of which some can be left out. Not for gradients."""

    def __init__(self, model: Any, batch: TrainingBatch, token_ids: Any = None) -> None:
        """Read the batch once with the whole model."""
        self._decoder, self._model, self._token_ids = decoder_of(model), model, token_ids
        self._columns = columns_of(model, token_ids)
        self._options: list[dict[str, Any]] = []  # what each layer is called with: mask, positions, …
        self.states: list[Any] = []  # [B, T, h]: the layers' inputs, and the last one's output
        hooks = [layer.register_forward_pre_hook(self._remember, with_kwargs=True) for layer in self._decoder.layers]
        hooks.append(self._decoder.norm.register_forward_pre_hook(lambda _, inputs: self.states.append(inputs[0])))
        try:
            self._decoder(input_ids=batch.token_ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self.predicting = torch.nn.functional.pad(batch.answer[:, 1:], (0, 1))  # tokens after which an answer goes on
        row, column = self.predicting.nonzero(as_tuple=True)
        self._targets = Targets.at(batch, row, column + 1)

    def _remember(self, _: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.states.append(inputs[0])
        self._options.append(options)

    def step(self, index: int, state: Any) -> Any:
        """The output [B, T, h] of layer `index` for this input."""
        found = self._decoder.layers[index](state, **self._options[index])
        return found[0] if isinstance(found, tuple) else found

    def kl(self, state: Any) -> tuple[float, int]:
        """KL from the main model, if `state` [B, T, h] is what the last layer has put out: its sum, and N."""
        hidden = self._decoder.norm(state[self.predicting])
        log_probs = logits_of(self._model, hidden, self._token_ids).float().log_softmax(-1)
        return float(kl_of_top(log_probs, self._targets, self._columns).sum()), len(hidden)


def by_search(walks: Sequence[Walk], num_layers: int, tell: Callable[[str], None]) -> tuple[int, ...]:
    """The layers that stay when the one that is missed least is left out, again and again.

    What leaving out a layer costs grows with what is left out already. So its last known cost is the least that it may
    cost now, and most layers need not be tried again (Minoux 1978, "Accelerated greedy algorithms").
    """
    kept = list(range(len(walks[0].states) - 1))
    inputs = [walk.states[:-1] for walk in walks]  # of the layers in `kept`

    def cost(place: int) -> float:
        pairs = zip(walks, inputs, strict=True)
        return _mean_kl(walks, [_run(walk, kept[place + 1 :], states[place]) for walk, states in pairs])

    known = [(cost(i), i, len(kept)) for i in kept]  # cost, layer, and how many there were when it was tried
    heapq.heapify(known)
    while len(kept) > num_layers:
        least, layer, count = heapq.heappop(known)
        out = kept.index(layer)
        if count > len(kept):
            heapq.heappush(known, (cost(out), layer, len(kept)))
            continue
        kept.remove(layer)
        tell(f"without layer {layer}: KL {least:.3f}")
        for walk, states in zip(walks, inputs, strict=True):
            del states[out + 1 :]
            for index in kept[out:-1]:
                states.append(walk.step(index, states[-1]))
            del states[len(kept) :]
    return tuple(kept)


def _run(walk: Walk, layers: Sequence[int], state: Any) -> Any:
    for index in layers:
        state = walk.step(index, state)
    return state


def _mean_kl(walks: Sequence[Walk], ends: Sequence[Any]) -> float:
    found = [walk.kl(end) for walk, end in zip(walks, ends, strict=True)]
    return sum(kl for kl, _ in found) / max(sum(count for _, count in found), 1)
