"""DSpark: DFlash's block, each token corrected by the one before, and the chance that it is accepted.

    out = head(embeddings, block_positions, head.context(taps, positions))
    logits, chance = head.drafts(out, token_ids_before)

The block is the text's newest token and block_size - 1 masks; the output at place i predicts the token after it. The
logits are those of the main model's output matrix plus W2 · W1[token before]. They are for the tokens that the main
model says most, `token_ids`: W1 has a row for each and one for all others, W2 a row for each.

Source: DSpark (DeepSeek 2026), as deepseek-ai/DeepSpec has it; the loss is its equation of section 3, below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider_export.distill.data import TrainingBatch
from outrider_export.distill.train.dflash import DFlash, rows_of
from outrider_export.distill.train.layers import Module, Teacher, linear
from outrider_export.distill.train.places import LossStep, Targets

TEXT_WEIGHT, DISTANCE_WEIGHT = 0.1, 0.9
DECAY = 4.0  # places until one weighs 1/e
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


class DSpark(DFlash):
    """The head. Its embedding and output matrix are the main model's. draft_vocab_size: of `token_ids`."""

    kind = "dspark"
    ahead = 1

    def __init__(self, *args: Any, draft_vocab_size: int, rank: int, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self.w1 = torch.nn.Parameter(torch.zeros(draft_vocab_size + 1, rank))
        self.w2 = torch.nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.confidence_head = Module()
        self.confidence_head.proj = linear(self.shape.hidden_size + rank, 1, bias=True)
        self.propose(torch.arange(draft_vocab_size))

    def propose(self, token_ids: Any) -> None:
        """The tokens that it proposes, int64 [draft vocab], ascending."""
        columns = torch.full((self.vocab_size,), len(token_ids))
        columns[token_ids] = torch.arange(len(token_ids))
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("matrix", self.main_lm_head[token_ids], persistent=False)
        self.register_buffer("columns", columns, persistent=False)  # of all other tokens: the last row of W1

    def start(self, teacher: Teacher, token_map: Any = None) -> None:
        """As DFlash; W1 has the main directions of the embedding, so that tokens that are alike begin alike."""
        super().start(teacher)
        self.propose(self.token_ids if token_map is None else token_map)
        rows = teacher.embedding[self.token_ids].float()
        rows = rows - rows.mean(0)
        _, directions = torch.linalg.eigh(rows.T @ rows)
        found = rows @ directions[:, -self.w1.shape[1] :]
        with torch.no_grad():
            self.w1[:-1, : found.shape[1]] = found / found.square().mean().sqrt()

    def drafts(self, out: Any, before: Any) -> tuple[Any, Any]:
        """out [N, h] and the tokens before, int64 [N], to logits [N, draft vocab] and those of the chance, [N]."""
        embedded = functional.embedding(self.columns[before], self.w1)
        logits = functional.linear(out, self.matrix) + functional.linear(embedded, self.w2)
        return logits, self.confidence_head.proj(torch.cat([out, embedded], -1))[..., 0]

    def loss(self, batch: TrainingBatch, step: LossStep) -> Any:
        """A scalar: cross-entropy on the text, the distance to the main model's distribution, and of the chance.

        0.1 · CE + 0.9 · |draft - target|₁ + BCE(chance, 1 - |draft - target|₁ / 2), weighted by exp(-place / 4). Of the
        target the stored top k are known: what it gives to others counts as distance.
        """
        out, places, valid = self._blocks(batch, step.generator)
        row, column = rows_of(places)[valid], places[valid]
        logits, chance = self.drafts(out[valid], batch.token_ids[row, column - 1])
        targets = Targets.at(batch, row, column)
        log_probs = functional.pad(logits.float().log_softmax(-1), (0, 1), value=-torch.inf)  # of all other tokens
        text = log_probs.gather(-1, self.columns[targets.token_ids][:, None])[:, 0]
        drafted = log_probs.gather(-1, self.columns[targets.top_ids.clamp(min=0)]).exp()
        shared = torch.minimum(drafted, targets.top_probs).sum(-1)
        losses = DISTANCE_WEIGHT * 2 * (1 - shared) - TEXT_WEIGHT * text.masked_fill(text.isinf(), 0)
        losses = losses + functional.binary_cross_entropy_with_logits(
            chance.float(), shared.detach().clamp(0, 1), reduction="none"
        )
        weights = (-torch.arange(self.num_places, device=losses.device) / DECAY).exp().expand_as(valid)[valid]
        return (weights * losses).sum() / weights.sum().clamp(min=1e-9)

    def hits(self, batch: TrainingBatch) -> tuple[Any, Any]:
        """See `DFlash`. A place reads the text's token before, which is the draft's own where all before are right."""
        out, places, valid = self._blocks(batch, torch.Generator().manual_seed(0))
        row = rows_of(places)
        found = torch.zeros_like(places)
        found[valid] = self.token_ids[self.drafts(out[valid], batch.token_ids[row, places - 1][valid])[0].argmax(-1)]
        return (found == batch.token_ids[row, places]).flatten(0, 1), valid.flatten(0, 1)

    def published(self) -> dict[str, Any]:
        """The tensors in DeepSpec's layout: W1 and W2 have rows for all tokens, which W2 gives no others."""
        tensors: dict[str, Any] = self.state_dict()
        w1, w2 = tensors.pop("w1"), tensors.pop("w2")
        return tensors | {_W1: w1[self.columns], _W2: functional.pad(w2, (0, 0, 0, 1))[self.columns]}

    def restore(self, tensors: dict[str, Any], token_ids: Any) -> dict[str, Any]:
        """Propose these tokens. Returns tensors in DeepSpec's layout by the names that they have here."""
        self.propose(token_ids)
        others = (self.columns == len(token_ids)).nonzero()[:1, 0]
        w1, w2 = tensors.pop(_W1), tensors.pop(_W2)
        last = w1[others] if len(others) else torch.zeros_like(w1[:1])
        return tensors | {"w1": torch.cat([w1[token_ids], last]), "w2": w2[token_ids]}
