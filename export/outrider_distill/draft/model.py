"""A small draft model in training, with the methods that all heads have.

    head = TrainedDraftModel(model, token_ids)             # layers are out of `model` already
    head.loss(batch).backward()
    right, valid = head.hits(held_out)

Weights are float32, as AdamW wants them; under `torch.autocast` the products are bf16. Of Qwen2.5-0.5B cut to 8 layers,
120 M of 256 M weights are trained: 1.9 GB with their gradients and moments, beside 0.5 GB of embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ExportError
from outrider_distill.draft.layers import columns_of, decoder_of, logits_of
from outrider_distill.train.layers import Module
from outrider_distill.train.places import Targets, draft_loss, mean_over

if TYPE_CHECKING:
    from outrider_distill.data import TrainingBatch

NUM_PLACES = 5  # draft tokens in a row that are evaluated, as of other heads that draft one after the other


class TrainedDraftModel(Module):
    """A transformers model that learns to say what the main model says, and proposes `token_ids` only."""

    kind = "draft"
    num_places = NUM_PLACES

    def __init__(self, model: Any, token_ids: Any = None) -> None:
        """token_ids: int64 [V], ascending, in the vocabulary of both models; None for all.

        Embedding and output matrix stay as they are: they are most of a small model's weights, and the rows of rare
        tokens would learn little from one main model's answers.

        Raises:
            ExportError: if its logits are more than the product with its output matrix.
        """
        super().__init__()
        self.model = model.requires_grad_(True)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("columns", columns_of(model, token_ids), persistent=False)
        for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):
            matrix.requires_grad_(False)
        self._check_logits()

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix, padding included."""
        return len(self.columns)

    def loss(self, batch: TrainingBatch, *_: Any) -> Any:
        """A scalar: `draft_loss`, the mean of all tokens of answers.

        All places are alike to a draft model, which reads its own tokens as it reads the text's: none weighs more.
        """
        predicting = batch.answer[:, 1:]
        row, column = predicting.nonzero(as_tuple=True)
        targets = Targets.at(batch, row, column + 1)
        return mean_over(draft_loss(self._logits(batch, predicting), targets, self.columns))

    def hits(self, batch: TrainingBatch) -> tuple[Any, Any]:
        """Whether drafts are the text's tokens, and which of them count: bool [N, NUM_PLACES] each.

        Place i drafts token t + 1 + i after token t, of an answer as that is. It reads the text's tokens, which are
        its own drafts as long as all before were right.
        """
        predicting = batch.answer[:, 1:] & batch.answer[:, :-1]
        found = torch.full_like(batch.token_ids[:, 1:], -1)
        drafted = self._logits(batch, predicting).argmax(-1)
        found[predicting] = drafted if self.token_ids is None else self.token_ids[drafted]
        right = torch.nn.functional.pad(found == batch.token_ids[:, 1:], (0, NUM_PLACES - 1))
        # A place counts if its token and the one that drafting begins after are of the answer.
        following = torch.nn.functional.pad(batch.answer[:, 1:], (0, NUM_PLACES - 1))
        valid = following.unfold(1, NUM_PLACES, 1) & batch.answer[:, :-1, None]
        return right.unfold(1, NUM_PLACES, 1).flatten(0, 1), valid.flatten(0, 1)

    def _logits(self, batch: TrainingBatch, predicting: Any) -> Any:
        """[N, V]: after the tokens of bool [B, T − 1]. Texts are padded on the right, where nothing looks at it."""
        hidden = decoder_of(self.model)(input_ids=batch.token_ids[:, :-1], use_cache=False).last_hidden_state
        return logits_of(self.model, hidden[predicting], self.token_ids)

    def _check_logits(self) -> None:
        token_ids = torch.zeros(1, 2, dtype=torch.int64, device=self.model.device)
        with torch.no_grad():
            hidden = decoder_of(self.model)(input_ids=token_ids, use_cache=False).last_hidden_state
            own = self.model(input_ids=token_ids, use_cache=False).logits
            if not torch.allclose(own, logits_of(self.model, hidden, None), rtol=1e-3, atol=1e-3):
                raise ExportError(
                    f"A {type(self.model).__name__} scales or caps its logits, which is not trained here. Choose "
                    "another draft model with --from."
                )
