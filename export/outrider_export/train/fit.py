"""Training of one head: AdamW for so many minutes, with warm-up and cosine decay, and accuracy on held-out text.

    head, config = start_head("eagle3", teacher, data)
    report = fit(head, data, minutes=20)
    save(head, config, folder, report)

A head from `load` can be trained further in the same way.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from outrider_export.train.files import build, new_config
from outrider_export.train.places import Accuracy, Candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider_export.train.data import Data
    from outrider_export.train.layers import Teacher

DRAFT_VOCAB_SIZE = 8192
TOKENS_IN_BATCH = {"masks": 1024, "dflash": 1024}
LEARNING_RATE = {"masks": 1e-2, "dflash": 1.5e-3}
WARM_UP = 0.04  # of the time
CLIP = 1.0
HELD_OUT_TOKENS = {"masks": 3000}


def start_head(
    kind: str, teacher: Teacher, data: Data, *, mask_token_id: int | None = None, seed: int = 0
) -> tuple[Any, dict[str, Any]]:
    """A new head with its starting weights, and its config.json."""
    torch.manual_seed(seed)
    vocab_size = teacher.shape.vocab_size
    draft_vocab_size = min(DRAFT_VOCAB_SIZE, vocab_size)
    config = new_config(kind, teacher.shape, draft_vocab_size=draft_vocab_size, mask_token_id=mask_token_id)
    head = build(config, teacher.embedding.float(), teacher.lm_head.float())
    if "draft_vocab_size" in config:
        head.start(teacher, torch.from_numpy(data.frequent_tokens(draft_vocab_size, vocab_size)))
    else:
        head.start(teacher)
    return head, config


def fit(
    head: Any,
    data: Data,
    *,
    minutes: float,
    seed: int = 0,
    learning_rate: float | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train `head` for `minutes` of wall time. Returns what training.json says of it.

    The rate falls over time rather than over steps: how many steps fit is not known before.
    """
    rate = learning_rate or LEARNING_RATE.get(head.kind, 1e-3)
    tokens_in_batch = TOKENS_IN_BATCH.get(head.kind, 2048)
    optimizer = torch.optim.AdamW(_groups(head), lr=rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    vocab_size = head.shape.vocab_size
    frequent = torch.from_numpy(data.frequent_tokens(min(DRAFT_VOCAB_SIZE, vocab_size), vocab_size))
    began, epoch, num_steps, num_tokens, mean = time.monotonic(), 0, 0, 0, 0.0
    told = began
    head.train()
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        for conversations in data.batches(tokens_in_batch, seed + epoch):
            done = (time.monotonic() - began) / (60 * minutes)
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(done)
            batch = data.read(conversations)
            with torch.autocast("cpu", torch.bfloat16):
                loss = head.loss(batch, Candidates.draw(frequent, vocab_size, generator))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
            optimizer.step()
            num_steps += 1
            num_tokens += int(batch.answer.sum())
            mean += (float(loss.detach()) - mean) * max(0.05, 1 / num_steps)
            if time.monotonic() - told > 20:
                told = time.monotonic()
                done_so_far = f"epoch {epoch}, step {num_steps}, {num_tokens} tokens, loss {mean:.4f}"
                tell(f"{head.kind}: {told - began:.0f} s, {done_so_far}")
        epoch += 1
    accuracy = evaluate(head, data)
    report = {
        "kind": head.kind,
        "data_tokens": data.num_tokens,
        "data_answer_tokens": data.num_answer_tokens,
        "trained_answer_tokens": num_tokens,
        "steps": num_steps,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "learning_rate": rate,
        "final_loss": round(mean, 4),
        "held_out_accuracy_by_place": accuracy.by_place(),
        "held_out_tokens_per_round": accuracy.mean_length(),
    }
    tell(str(report))
    return report


def evaluate(head: Any, data: Data) -> Accuracy:
    """Greedy drafts on held-out greedy answers: how often each place is right, given that those before it are."""
    head.eval()
    accuracy = Accuracy()
    for conversations in data.held_out(2048, HELD_OUT_TOKENS.get(head.kind, 10000)):
        with torch.no_grad():
            accuracy.add(*head.hits(data.read(conversations)))
    return accuracy


def schedule(done: float) -> float:
    """The rate's factor after a share `done` of the time: linear warm-up, then a cosine down to 0.05."""
    if done < WARM_UP:
        return 0.05 + 0.95 * done / WARM_UP
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def _groups(head: Any) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    parameters = [each for each in head.parameters() if each.requires_grad]
    matrices = [each for each in parameters if each.dim() > 1 and head.kind != "masks"]
    others = [each for each in parameters if each.dim() <= 1 or head.kind == "masks"]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
