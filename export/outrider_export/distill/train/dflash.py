"""DFlash: a block of masks is filled in one pass, by layers that attend to the main model's hidden states.

    keys_values = head.context(taps, positions)
    out = head(embeddings, block_positions, keys_values)
    draft_token_ids = head.logits(out[:, 1:]).argmax(-1)

The block is the text's last token and block_size - 1 times the mask token, as embeddings of the main model. The context
is all tokens before the block: the main model's hidden states of the block's first token are not known yet. Within the
block attention goes both ways. The output at a mask predicts the token at that very position.

Source: DFlash (Chen et al. 2026), as the reference code at z-lab/dflash and the export in optimum-intel have it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from outrider_export.distill.data import TrainingBatch
from outrider_export.distill.train.layers import (
    MLP,
    Attention,
    Module,
    RMSNorm,
    Shape,
    Teacher,
    copy_layer,
    linear,
)
from outrider_export.distill.train.places import LossStep, Targets, blocks_loss

BLOCKS_IN_TEXT = 24


class BlockLayer(Module):
    """A decoder layer's tensors, with norms of queries and keys, as in Qwen3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.self_attn = Attention(shape, shape.hidden_size, head_norms=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.mlp = MLP(shape)


class DFlash(Module):
    """The head. Its embedding and output matrix are the main model's."""

    kind = "dflash"
    ahead = 0  # positions from a place of the block to the token that it predicts

    def __init__(
        self, shape: Shape, embedding: Any, lm_head: Any, *, num_layers: int, block_size: int, mask_token_id: int
    ) -> None:
        super().__init__()
        self.shape, self.block_size, self.mask_token_id = shape, block_size, mask_token_id
        self.num_places, self.vocab_size = block_size - 1 + self.ahead, shape.vocab_size
        self.fc = linear(3 * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.layers = torch.nn.ModuleList([BlockLayer(shape) for _ in range(num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("main_lm_head", lm_head, persistent=False)

    def start(self, teacher: Teacher) -> None:
        """Start from the main model's last layers and final norm, on the last tapped layer."""
        with torch.no_grad():
            for layer, source in zip(self.layers, teacher.layers[-len(self.layers) :], strict=True):
                copy_layer(layer, source)
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)
            self.norm.weight.copy_(teacher.norm)

    def context(self, taps: Any, positions: Any) -> list[tuple[Any, Any]]:
        """For each layer, keys and values [B, K, S, d] of taps [B, S, 3h] at positions int64 [S] or [B, S]."""
        hidden = self.hidden_norm(self.fc(taps))
        return [layer.self_attn.keys_values(hidden, positions) for layer in self.layers]

    def forward(self, embedding: Any, positions: Any, context: list[tuple[Any, Any]], mask: Any = None) -> Any:
        """embedding [B, T, h] of a block at positions int64 [T] or [B, T], to the last hidden states [B, T, h].

        mask: bool [.., T, S + T], which keys a query sees; by default the whole context and the whole block.
        """
        x = embedding
        for layer, (context_keys, context_values) in zip(self.layers, context, strict=True):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(normed, positions)
            k, v = torch.cat([context_keys, k], 2), torch.cat([context_values, v], 2)
            x = x + layer.self_attn.attend(layer.self_attn.queries(normed, positions), k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def logits(self, out: Any) -> Any:
        """[..., h] to [..., vocab]."""
        return functional.linear(out, self.main_lm_head)

    def loss(self, batch: TrainingBatch, step: LossStep) -> Any:
        """A scalar: `blocks_loss`, from blocks at random tokens of answers."""
        out, places, valid = self._blocks(batch, step.generator)
        row = rows_of(places)
        logits = functional.linear(out[valid], self.main_lm_head[step.candidates.token_ids])
        return blocks_loss(logits, Targets.at(batch, row[valid], places[valid]), valid, step)

    def hits(self, batch: TrainingBatch) -> tuple[Any, Any]:
        """Whether drafts are the text's tokens, and which of them count: bool [N, places] each."""
        out, places, valid = self._blocks(batch, torch.Generator().manual_seed(0))
        found = torch.zeros_like(places)
        found[valid] = self.logits(out[valid]).argmax(-1)
        right = found == batch.token_ids[rows_of(places), places]
        return right.flatten(0, 1), valid.flatten(0, 1)

    def _blocks(self, batch: TrainingBatch, generator: Any) -> tuple[Any, Any, Any]:
        """Blocks at random answer tokens of each text, A = BLOCKS_IN_TEXT of them or all.

        Returns out [B, A, places, h], the positions that it predicts, int64 [B, A, places], and which of them are
        tokens of the answer, bool [B, A, places]. All blocks of a text are read in one pass, hidden from each other.
        """
        num_texts, num_tokens = batch.token_ids.shape
        size, device = self.block_size, batch.token_ids.device
        weights = batch.answer[:, 1:].float().cpu() + 1e-9
        count = min(BLOCKS_IN_TEXT, num_tokens - 1)
        anchors = 1 + torch.multinomial(weights, count, generator=generator).to(device)  # [B, A]
        positions = anchors[..., None] + torch.arange(size, device=device)  # [B, A, block]
        token_ids = torch.full_like(positions, self.mask_token_id)
        token_ids[..., 0] = batch.token_ids.gather(1, anchors)
        embedding = functional.embedding(token_ids.flatten(1), self.embedding)
        before = torch.arange(num_tokens, device=device) < anchors[..., None]  # [B, A, T]
        own = torch.block_diag(*[torch.ones(size, size, dtype=torch.bool, device=device)] * count)
        mask = torch.cat([before.repeat_interleave(size, 1), own.expand(num_texts, -1, -1)], -1)
        context = self.context(batch.taps, torch.arange(num_tokens, device=device))
        out = self(embedding, positions.flatten(1), context, mask[:, None]).unflatten(1, (count, size))
        out, places = out[:, :, 1 - self.ahead :], positions[..., 1 - self.ahead :] + self.ahead
        inside = places < num_tokens
        places = places.clamp(max=num_tokens - 1)
        valid = inside & batch.answer[rows_of(places), places] & batch.answer.gather(1, anchors)[..., None]
        return out, places, valid


def rows_of(places: Any) -> Any:
    """The text of each of places [B, A, n]."""
    return torch.arange(len(places), device=places.device)[:, None, None].expand_as(places)
