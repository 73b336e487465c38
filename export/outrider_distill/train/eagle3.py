"""EAGLE-3: a head that drafts one token after the other with a decoder layer of its own (Li et al. 2025).

    out, past = head(embedding, head.enter(taps), positions, past)
    draft_token_ids = head.to_main(head.logits(out).argmax(-1))

The head's position t reads the embedding of token t + 1 beside the main model's hidden states of token t, and predicts
token t + 2. To draft on, the next position reads the drafted token's embedding beside `out` of this one. Keys and
values that were computed from `out` instead of a hidden state of the main model are to be forgotten once the main model
has read the token. Positions are counted from 0; only their differences matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outrider_distill.train.layers import (
    MLP,
    Attention,
    Module,
    RMSNorm,
    Shape,
    Teacher,
    as_causal_mask,
    copy_layer,
    linear,
)
from outrider_distill.train.places import Reach, Targets, columns_of, draft_loss, mean_over

if TYPE_CHECKING:
    from outrider_distill.data import TrainingBatch

TRAINED_STEPS, EVALUATED_STEPS = 4, 5


class DecoderLayer(Module):
    """A decoder layer's tensors; `Eagle3` says in which order they are used."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self, name, RMSNorm(shape.hidden_size, shape.norm_epsilon))
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.mlp = MLP(shape)


class Eagle3(Module):
    """The head: it reads three layers of the main model, and has a small output matrix of its own."""

    kind = "eagle3"
    num_places = TRAINED_STEPS

    def __init__(self, shape: Shape, embedding: Any, draft_vocab_size: int) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, shape.vocab_size
        self.register_buffer("embedding", embedding, persistent=False)
        self.fc = linear(3 * shape.hidden_size, shape.hidden_size)
        self.midlayer = DecoderLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.lm_head = linear(shape.hidden_size, draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    def start(self, teacher: Teacher, token_map: Any) -> None:
        """Start from the main model's last layer on the last tapped one. token_map: int64 [draft vocab], ascending."""
        self.d2t.copy_(token_map - torch.arange(len(token_map)))
        self.t2d[token_map] = True
        copy_layer(self.midlayer, teacher.layers[-1])
        with torch.no_grad():
            self.midlayer.hidden_norm.weight.copy_(teacher.layers[-1]["input_layernorm.weight"])
            self.midlayer.input_layernorm.weight.fill_(1.0)
            # Outputs of early layers are small beside those of late ones: start from the late ones alone.
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)
            self.norm.weight.copy_(teacher.norm)
            self.lm_head.weight.copy_(teacher.lm_head[token_map])

    def enter(self, taps: Any) -> Any:
        """The main model's states [B, T, 3h] as hidden input [B, T, h]."""
        return self.fc(taps)

    def logits(self, out: Any) -> Any:
        """[..., h] to [..., draft vocab]."""
        return self.lm_head(self.norm(out))

    def to_main(self, token_ids: Any) -> Any:
        """Token ids of `logits` as the main model's."""
        return token_ids + self.d2t[token_ids]

    def forward(self, embedding: Any, hidden: Any, positions: Any, past: Any = None) -> tuple[Any, tuple[Any, Any]]:
        """One or more positions, after those in `past`.

        embedding, hidden: [B, T, h]. positions: int64 [T] or [B, T]. past: keys and values, [B, K, S, d] each.
        Returns the hidden [B, T, h] that `logits` reads and that is fed back, and past with these positions.
        """
        x = self._mix(embedding, hidden)
        q = self.midlayer.self_attn.queries(x, positions)
        k, v = self.midlayer.self_attn.keys_values(x, positions)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = as_causal_mask(q.shape[2], k.shape[2], q.device)
        return self._finish(hidden, self.midlayer.self_attn.attend(q, k, v, mask)), (k, v)

    def unroll(self, embedding: Any, hidden: Any, num_steps: int) -> list[Any]:
        """The outputs [B, T, h] of `num_steps` steps of drafting from every position at once.

        Step s at position t reads token t + 1 and the output of step s - 1 at position t - 1, as if drafting had begun
        s - 1 positions before. It sees the first step's keys up to there, and of the steps between one position each.
        Source: the training-time test of EAGLE-3 (Li et al. 2025, section 3.2).
        """
        attention = self.midlayer.self_attn
        num_tokens = hidden.shape[1]
        positions = torch.arange(num_tokens, device=hidden.device)
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        keys, values, outs = [], [], []
        for step in range(num_steps):
            x = self._mix(embedding, hidden)
            q = attention.queries(x, positions) * self.shape.head_size**-0.5
            k, v = attention.keys_values(x, positions)
            keys.append(k.repeat_interleave(repeats, 1))
            values.append(v.repeat_interleave(repeats, 1))
            scores = q @ keys[0].transpose(-1, -2)
            seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(-step)
            parts = [scores.masked_fill(~seen, -torch.inf)]
            lags = [(i, step - i) for i in range(1, step + 1)]
            parts += [(q * _later(keys[i], lag)).sum(-1, keepdim=True) for i, lag in lags]
            weights = torch.cat(parts, -1).softmax(-1, dtype=torch.float32).to(v.dtype)
            found = weights[..., :num_tokens] @ values[0]
            for column, (i, lag) in enumerate(lags):
                found = found + weights[..., num_tokens + column, None] * _later(values[i], lag)
            out = self._finish(hidden, attention.o_proj(found.transpose(1, 2).flatten(2)))
            outs.append(out)
            hidden = _later(out, 1)
        return outs

    def loss(self, batch: TrainingBatch, reach: Reach, chance: float) -> Any:
        """A scalar: `draft_loss`, the mean of each unrolled step, of as many as `reach` draws."""
        num_places, weight = reach.draw(chance)
        embedding, hidden = self._inputs(batch)
        columns = columns_of(self.to_main(torch.arange(len(self.d2t), device=self.d2t.device)), self.vocab_size)
        num_roots = max(hidden.shape[1] - num_places + 1, 0)
        total, right, counted = 0.0, [], []
        for place, out in enumerate(self.unroll(embedding, hidden, num_places)):
            valid = self._valid(batch, place)
            row, column = valid.nonzero(as_tuple=True)
            targets = Targets.at(batch, row, column + 2)
            logits = self.logits(out[valid])
            total = total + weight * mean_over(draft_loss(logits, targets, columns))
            hits = torch.zeros_like(valid)
            hits[valid] = logits.max(-1).indices == columns[targets.token_ids]
            right.append(hits[:, place : place + num_roots])
            counted.append(valid[:, place : place + num_roots])
        reach.follow(torch.stack(right, -1).flatten(0, 1), torch.stack(counted, -1).flatten(0, 1))
        return total

    def hits(self, batch: TrainingBatch) -> tuple[Any, Any]:
        """Whether drafts are the text's tokens, and which of them count: bool [N, places] each.

        Step by step on the text's own tokens, which are the head's own drafts as long as all before were right.
        """
        embedding, hidden = self._inputs(batch)
        right, valid = [], []
        num_roots = max(hidden.shape[1] - EVALUATED_STEPS + 1, 0)
        for step, out in enumerate(self.unroll(embedding, hidden, EVALUATED_STEPS)):
            here = self._valid(batch, step)
            found = torch.zeros_like(batch.token_ids[:, 2:])
            found[here] = self.to_main(self.logits(out[here]).argmax(-1))
            right.append((found == batch.token_ids[:, 2:])[:, step : step + num_roots])
            valid.append(here[:, step : step + num_roots])
        return torch.stack(right, -1).flatten(0, 1), torch.stack(valid, -1).flatten(0, 1)

    def _inputs(self, batch: TrainingBatch) -> tuple[Any, Any]:
        taps: Any = batch.taps
        return functional.embedding(batch.token_ids[:, 1:-1], self.embedding), self.enter(taps[:, :-2])

    def _mix(self, embedding: Any, hidden: Any) -> Any:
        """Embedding and hidden, [B, T, h] each, as the attention reads them, [B, T, 2h]."""
        return torch.cat([self.midlayer.input_layernorm(embedding), self.midlayer.hidden_norm(hidden)], -1)

    def _valid(self, batch: TrainingBatch, step: int) -> Any:
        """Positions t whose token t + 2 is of an answer, as is token t + 1 - step, from which drafting began."""
        valid = batch.answer[:, 2:].clone()
        valid[:, :step] = False
        valid[:, step:] &= batch.answer[:, 1 : batch.answer.shape[1] - 1 - step]
        return valid

    def _finish(self, residual: Any, attended: Any) -> Any:
        x = residual + attended
        return x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))


def _later(x: Any, count: int) -> Any:
    """x [.., T, d] moved to later positions by `count`; zeros come in, for positions that do not count."""
    return functional.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :] if count else x
