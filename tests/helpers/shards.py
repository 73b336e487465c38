"""Training data in the format of `outrider_distill.data`, written by hand."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

KEPT = 32


def counting(num_conversations: int, vocab_size: int) -> list[list[int]]:
    """Conversations that count upwards, which any drafter can learn."""
    return [[(7 * i + j) % vocab_size for j in range(20 + i % 7)] for i in range(num_conversations)]


def write_shard(
    folder: Path,
    conversations: Sequence[Sequence[int]],
    states: Any = None,
    *,
    prompt_tokens: int = 5,
    greedy: bool = True,
    kept: int = 3,
) -> Path:
    """Write a shard with one prompt and one answer a conversation.

    states: for token ids int64 [n], the hidden states taps [n, 3h]; without it there are none. The main model gives the
    text's own token 0.8, the two numbers after it a tenth each.
    """
    folder.mkdir(parents=True)
    starts = np.cumsum([0, *map(len, conversations)], dtype=np.int64)
    tokens = np.concatenate([np.array(each, dtype=np.int32) for each in conversations])
    answer = np.concatenate([np.arange(len(each)) >= prompt_tokens for each in conversations])
    top_ids = np.full((len(tokens), KEPT), -1, dtype=np.int32)
    top_probs = np.zeros((len(tokens), KEPT), dtype=np.float16)
    for begin, end in pairwise(starts):
        predicting = np.flatnonzero(answer[begin + 1 : end]) + begin
        for i in range(kept):
            top_ids[predicting, i] = (tokens[predicting + 1] + i) % (tokens.max() + 1)
            top_probs[predicting, i] = 0.8 if i == 0 else 0.1
    arrays = {
        "tokens": tokens, "answer": answer, "starts": starts, "top_ids": top_ids, "top_probs": top_probs,
        "greedy": np.full(len(conversations), greedy),
    }  # fmt: skip
    if states is not None:
        found = [states(np.array(each, dtype=np.int64)) for each in conversations]
        arrays["taps"] = np.concatenate(found).astype(np.float16)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    lines = [json.dumps({"prompt": f"Count from {each[0]}.", "source": "user"}) for each in conversations]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
