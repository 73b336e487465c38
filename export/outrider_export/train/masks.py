"""Mask tokens: embeddings that make the main model itself predict several tokens ahead.

The frozen main model reads a text and `num_masks` trained embeddings behind it, at the positions that follow. Its
logits at the text's last token t predict token t + 1 as ever, those at mask i (from 1) predict token t + 1 + i.

Source: PaSS (Monea et al. 2023) and hidden transfer/PPD (Chen et al. 2024): trained embeddings only.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import ExportError
from outrider_export.distill.data import Batch
from outrider_export.train.dflash import rows_of
from outrider_export.train.layers import Module, Shape, Teacher
from outrider_export.train.places import Step, Targets, blocks_loss

PLACES_IN_TEXT = 24


class MaskTokens(Module):
    """The trained embeddings. Training and evaluation need the main model: give its `Teacher`, with `teach`."""

    kind = "masks"

    def __init__(self, shape: Shape, embedding: Any, lm_head: Any, num_masks: int) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, shape.vocab_size
        self.num_masks = self.num_places = num_masks
        self.embeddings = torch.nn.Parameter(torch.zeros(num_masks, shape.hidden_size))
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("main_lm_head", lm_head, persistent=False)
        self._main: list[Any] = []  # a list, so that the main model is no submodule

    def start(self, teacher: Teacher) -> None:
        """Start from the mean of all embeddings, and remember the main model for training."""
        self.teach(teacher)
        with torch.no_grad():
            noise = torch.randn_like(self.embeddings) * teacher.embedding.float().std()
            self.embeddings.copy_(teacher.embedding.float().mean(0) + 0.5 * noise)

    def teach(self, teacher: Teacher) -> None:
        """Remember the main model, which training and evaluation need."""
        self._main = [teacher.model]

    def forward(self, embedded: Any) -> Any:
        """Embeddings [B, T, h] of texts with the masks behind them: [B, T + num_masks, h]."""
        masks = self.embeddings.to(embedded.dtype).expand(len(embedded), -1, -1)
        return torch.cat([embedded, masks], 1)

    def loss(self, batch: Batch, step: Step) -> Any:
        """A scalar: `blocks_loss`, from masks behind random tokens of answers."""
        out, places, valid = self._masked(batch, step.generator)
        rows = self.main_lm_head[step.candidates.token_ids].float()
        row = rows_of(places)
        logits = torch.nn.functional.linear(out[valid].float(), rows)
        return blocks_loss(logits, Targets.at(batch, row[valid], places[valid]), valid, step)

    def hits(self, batch: Batch) -> tuple[Any, Any]:
        """Whether drafts are the text's tokens, and which of them count: bool [N, places] each."""
        out, targets, valid = self._masked(batch, torch.Generator().manual_seed(0))
        found = torch.zeros_like(targets)
        found[valid] = torch.nn.functional.linear(out[valid].float(), self.main_lm_head.float()).argmax(-1)
        row = rows_of(targets)
        return (found == batch.token_ids[row, targets]).flatten(0, 1), valid.flatten(0, 1)

    def _masked(self, batch: Batch, generator: Any) -> tuple[Any, Any, Any]:
        """Masks behind random tokens t of answers, P = PLACES_IN_TEXT of them in each text.

        Returns the last hidden states [B, P, masks, h], the tokens that they predict, int64 [B, P, masks], and which of
        those are of the answer. The text is read once, without gradients; then all masks, hidden from each other.
        """
        if not self._main:
            raise ExportError("Mask tokens are trained in the main model: call teach(teacher) first.")
        from transformers import DynamicCache

        main = self._main[0].to(batch.token_ids.device)
        num_texts, num_tokens = batch.token_ids.shape
        with torch.no_grad():
            cache = main.model(
                input_ids=batch.token_ids, past_key_values=DynamicCache(), use_cache=True
            ).past_key_values
        weights, device = batch.answer.float().cpu() + 1e-9, batch.token_ids.device
        anchors = torch.multinomial(weights, PLACES_IN_TEXT, replacement=True, generator=generator).to(device)  # [B, P]
        positions = anchors[..., None] + 1 + torch.arange(self.num_masks, device=device)  # [B, P, masks]
        seen = torch.arange(num_tokens, device=device) <= anchors[..., None]
        block = torch.ones(self.num_masks, self.num_masks, dtype=torch.bool, device=device).tril()
        own = torch.block_diag(*[block] * PLACES_IN_TEXT).expand(num_texts, -1, -1)
        mask = torch.cat([seen.repeat_interleave(self.num_masks, 1), own], -1)[:, None]
        masks = self.embeddings.repeat(PLACES_IN_TEXT, 1).expand(num_texts, -1, -1)
        added = torch.zeros(mask.shape, dtype=main.dtype, device=device).masked_fill(~mask, torch.finfo(main.dtype).min)
        out = main.model(
            inputs_embeds=masks.to(main.dtype),
            attention_mask=added,
            position_ids=positions.flatten(1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state.unflatten(1, (PLACES_IN_TEXT, self.num_masks))
        targets = positions + 1
        inside = targets < num_tokens
        targets = targets.clamp(max=num_tokens - 1)
        row = torch.arange(num_texts, device=device)[:, None, None]
        valid = inside & batch.answer[row, targets] & batch.answer.gather(1, anchors)[..., None]
        return out, targets, valid
