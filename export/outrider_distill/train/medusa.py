"""Medusa: heads that draft several tokens from one hidden state (Cai et al. 2024).

Head i reads the main model's last hidden state (after the final norm) of token t, and predicts token t + 2 + i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider_distill.data import TrainingBatch
from outrider_distill.train.layers import Module, Shape, Teacher, linear
from outrider_distill.train.places import Reach, Targets, columns_of, draft_loss, mean_over


class ResBlock(Module):
    """x + silu(linear(x)); the identity to begin with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: Any) -> Any:
        """[..., h] to [..., h]."""
        return x + functional.silu(self.linear(x))


class Medusa(Module):
    """The heads, each a residual block and an output matrix over the draft vocabulary."""

    kind = "medusa"

    def __init__(self, shape: Shape, num_heads: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.num_heads, self.num_places = shape.vocab_size, num_heads, num_heads
        for index in range(num_heads):
            block, matrix = ResBlock(shape.hidden_size), linear(shape.hidden_size, draft_vocab_size)
            self.add_module(str(index), torch.nn.Sequential(block, matrix))
        self.register_buffer("token_map", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def start(self, teacher: Teacher, token_map: Any) -> None:
        """Start output matrices from the main model's. token_map: int64 [draft vocab]."""
        self.token_map.copy_(token_map)
        with torch.no_grad():
            for index in range(self.num_heads):
                self.get_parameter(f"{index}.1.weight").copy_(teacher.lm_head[token_map])

    def head(self, index: int, last: Any) -> Any:
        """Head `index`: last [..., h] to logits [..., draft vocab]."""
        return self._modules[str(index)](last)

    def to_main(self, token_ids: Any) -> Any:
        """Token ids of the logits as the main model's."""
        return self.token_map[token_ids]

    def loss(self, batch: TrainingBatch, reach: Reach) -> Any:
        """A scalar: `draft_loss`, the mean of each head, weighted by the chance that its place is reached."""
        columns = columns_of(self.token_map, self.vocab_size)
        num_tokens = batch.token_ids.shape[1] - 1 - self.num_heads
        total, right, counted = 0.0, [], []
        for index, weight in enumerate(reach.weights):
            valid = self._valid(batch, index)
            last, targets = self._examples(batch, index, valid)
            logits = self.head(index, last)
            total = total + weight * mean_over(draft_loss(logits, targets, columns))
            hits = torch.zeros_like(valid)
            hits[valid] = logits.argmax(-1) == columns[targets.token_ids]
            right.append(hits[:, :num_tokens])
            counted.append(valid[:, :num_tokens])
        reach.follow(torch.stack(right, -1).flatten(0, 1), torch.stack(counted, -1).flatten(0, 1))
        return total

    def hits(self, batch: TrainingBatch) -> tuple[Any, Any]:
        """Whether drafts are the text's tokens, and which of them count: bool [N, places] each."""
        num_tokens = batch.token_ids.shape[1] - 1 - self.num_heads
        right, valid = [], []
        for index in range(self.num_heads):
            here = self._valid(batch, index)
            last, targets = self._examples(batch, index, here)
            found = torch.zeros_like(here)
            found[here] = self.to_main(self.head(index, last).argmax(-1)) == targets.token_ids
            right.append(found[:, :num_tokens])
            valid.append(here[:, :num_tokens])
        return torch.stack(right, -1).flatten(0, 1), torch.stack(valid, -1).flatten(0, 1)

    def _valid(self, batch: TrainingBatch, index: int) -> Any:
        """bool [B, T - 2 - index]: positions t whose tokens t + 1 and t + 2 + index are of an answer."""
        return batch.answer[:, 2 + index :] & batch.answer[:, 1 : batch.answer.shape[1] - 1 - index]

    def _examples(self, batch: TrainingBatch, index: int, valid: Any) -> tuple[Any, Targets]:
        """last [N, h], and what is to be predicted from the N valid positions."""
        row, column = valid.nonzero(as_tuple=True)
        last: Any = batch.last
        return last[row, column], Targets.at(batch, row, column + 2 + index)
