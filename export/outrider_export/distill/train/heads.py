"""Heads that draft several tokens from one hidden state: Medusa, Hydra and blockwise decoding.

Head i reads the main model's last hidden state (after the final norm) of token t, and predicts token t + 2 + i. Hydra's
heads read the embeddings of tokens t + 1 … t + 1 + i as well: the text's next token and the drafts of the heads before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider_export.distill.data import TrainingBatch
from outrider_export.distill.train.layers import Module, Shape, Teacher, linear
from outrider_export.distill.train.places import Candidates, LossStep, Targets, draft_loss, mean_over


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


class ParallelHeads(Module):
    """What the three have in common."""

    kind: str

    def __init__(self, shape: Shape, embedding: Any, lm_head: Any, num_heads: int) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, shape.vocab_size
        self.num_heads = self.num_places = num_heads
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("main_lm_head", lm_head, persistent=False)

    def start(self, teacher: Teacher, token_map: Any) -> None:
        """Start output matrices from the main model's. token_map: int64 [draft vocab]."""
        self.token_map.copy_(token_map)
        with torch.no_grad():
            for index in range(self.num_heads):
                self.get_parameter(f"{index}.1.weight").copy_(teacher.lm_head[token_map])

    def head(self, index: int, last: Any, following: Any) -> Any:
        """Head `index`: last [..., h], following int64 [..., index + 1] to logits [..., draft vocab]."""
        raise NotImplementedError

    def to_main(self, token_ids: Any) -> Any:
        """Token ids of the logits as the main model's."""
        return self.token_map[token_ids]

    def forward(self, last: Any, token_ids: Any) -> Any:
        """Greedy drafts int64 [N, num_heads] after last [N, h] and the token that follows, token_ids int64 [N]."""
        following = token_ids[:, None]
        for index in range(self.num_heads):
            drafted = self.to_main(self.head(index, last, following).argmax(-1))
            following = torch.cat([following, drafted[:, None]], -1)
        return following[:, 1:]

    def loss(self, batch: TrainingBatch, step: LossStep) -> Any:
        """A scalar: `draft_loss`, the mean of each head, weighted by the chance that its place is reached."""
        candidates = self._candidates(step)
        num_tokens = batch.token_ids.shape[1] - 1 - self.num_heads
        total, right, counted = 0.0, [], []
        for index, weight in enumerate(step.reach.weights):
            valid = self._valid(batch, index)
            last, following, targets = self._examples(batch, index, valid)
            logits = self._train_logits(index, last, following, candidates)
            total = total + weight * mean_over(draft_loss(logits, targets, candidates.columns))
            hits = torch.zeros_like(valid)
            hits[valid] = logits.argmax(-1) == candidates.columns[targets.token_ids]
            right.append(hits[:, :num_tokens])
            counted.append(valid[:, :num_tokens])
        step.reach.follow(torch.stack(right, -1).flatten(0, 1), torch.stack(counted, -1).flatten(0, 1))
        return total

    def hits(self, batch: TrainingBatch) -> tuple[Any, Any]:
        """Whether drafts are the text's tokens, and which of them count: bool [N, places] each."""
        num_tokens = batch.token_ids.shape[1] - 1 - self.num_heads
        right, valid = [], []
        for index in range(self.num_heads):
            here = self._valid(batch, index)
            last, following, targets = self._examples(batch, index, here)
            found = torch.zeros_like(here)
            found[here] = self.to_main(self.head(index, last, following).argmax(-1)) == targets.token_ids
            right.append(found[:, :num_tokens])
            valid.append(here[:, :num_tokens])
        return torch.stack(right, -1).flatten(0, 1), torch.stack(valid, -1).flatten(0, 1)

    def _valid(self, batch: TrainingBatch, index: int) -> Any:
        """bool [B, T - 2 - index]: positions t whose tokens t + 1 and t + 2 + index are of an answer."""
        return batch.answer[:, 2 + index :] & batch.answer[:, 1 : batch.answer.shape[1] - 1 - index]

    def _examples(self, batch: TrainingBatch, index: int, valid: Any) -> tuple[Any, Any, Targets]:
        """last [N, h], following int64 [N, index + 1], and what is to be predicted from the N valid positions."""
        row, column = valid.nonzero(as_tuple=True)
        steps = torch.arange(1, index + 2, device=row.device)
        following = batch.token_ids[row[:, None], column[:, None] + steps]
        last: Any = batch.last
        return last[row, column], following, Targets.at(batch, row, column + 2 + index)

    def _candidates(self, step: LossStep) -> Candidates:
        """The tokens that the loss is over: those of the heads' own output matrices, if they have some."""
        if "token_map" in self._buffers:
            return Candidates.of(self.token_map, self.shape.vocab_size)
        return step.candidates

    def _train_logits(self, index: int, last: Any, following: Any, candidates: Candidates) -> Any:
        """Logits [N, candidates]."""
        del candidates
        return self.head(index, last, following)


class Medusa(ParallelHeads):
    """Medusa (Cai et al. 2024): each head a residual block and an output matrix over the draft vocabulary."""

    kind = "medusa"

    def __init__(self, shape: Shape, embedding: Any, lm_head: Any, num_heads: int, draft_vocab_size: int) -> None:
        super().__init__(shape, embedding, lm_head, num_heads)
        for index in range(num_heads):
            block, matrix = ResBlock(shape.hidden_size), linear(shape.hidden_size, draft_vocab_size)
            self.add_module(str(index), torch.nn.Sequential(block, matrix))
        self.register_buffer("token_map", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def head(self, index: int, last: Any, following: Any) -> Any:
        """See ParallelHeads."""
        del following
        return self._modules[str(index)](last)


class Hydra(ParallelHeads):
    """Hydra (Ankner et al. 2024): as Medusa, but each head also reads the tokens drafted before it."""

    kind = "hydra"

    def __init__(self, shape: Shape, embedding: Any, lm_head: Any, num_heads: int, draft_vocab_size: int) -> None:
        super().__init__(shape, embedding, lm_head, num_heads)
        size = shape.hidden_size
        for index in range(num_heads):
            parts = {"in": linear((index + 2) * size, size, bias=True), "0": ResBlock(size)}
            self.add_module(str(index), torch.nn.ModuleDict(parts | {"1": linear(size, draft_vocab_size)}))
        self.register_buffer("token_map", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def head(self, index: int, last: Any, following: Any) -> Any:
        """See ParallelHeads."""
        parts = self._modules[str(index)]
        embedded = functional.embedding(following, self.embedding).flatten(-2)
        x = last + functional.silu(parts["in"](torch.cat([last, embedded], -1)))
        return parts["1"](parts["0"](x))


class Blockwise(ParallelHeads):
    """Blockwise decoding (Stern et al. 2018): each head a residual MLP before the main model's output matrix."""

    kind = "blockwise"

    def __init__(self, shape: Shape, embedding: Any, lm_head: Any, num_heads: int) -> None:
        super().__init__(shape, embedding, lm_head, num_heads)
        size = shape.hidden_size
        for index in range(num_heads):
            parts = {"up": linear(size, 2 * size, bias=True), "down": linear(2 * size, size, bias=True)}
            self.add_module(str(index), torch.nn.ModuleDict(parts))

    def start(self, teacher: Teacher, token_map: Any = None) -> None:  # noqa: ARG002
        """Start as the main model's own prediction of the token before."""
        for index in range(self.num_heads):
            torch.nn.init.zeros_(self._modules[str(index)]["down"].weight)

    def hidden(self, index: int, last: Any) -> Any:
        """last [..., h] to what the main model's output matrix reads [..., h]."""
        parts = self._modules[str(index)]
        return last + parts["down"](functional.relu(parts["up"](last)))

    def head(self, index: int, last: Any, following: Any) -> Any:
        """See ParallelHeads."""
        del following
        return functional.linear(self.hidden(index, last), self.main_lm_head)

    def to_main(self, token_ids: Any) -> Any:
        """See ParallelHeads."""
        return token_ids

    def _train_logits(self, index: int, last: Any, following: Any, candidates: Candidates) -> Any:
        del following
        return functional.linear(self.hidden(index, last), self.main_lm_head[candidates.token_ids])
