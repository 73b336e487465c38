"""The projections of Qwen3-Next's gated delta nets, of which a checkpoint has two in one matrix, by heads of keys.

    module, count, rows = rows_in_fused("linear_attn.in_proj_z", state)     # those of "linear_attn.in_proj_qkvz"

Source: Transformers 5.5, modeling_qwen3_next.py, `fix_query_key_value_ordering`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_export.direct.states import GatedDeltaNet


def rows_in_fused(part: str, state: GatedDeltaNet) -> tuple[str, int, NDArray[np.int64]] | None:
    """The matrix that holds a projection, how many rows it has, and which of them; None if there is no such matrix."""
    each = state.num_heads // state.num_key_heads
    values = each * state.head_size
    sizes: tuple[int, ...]
    wanted: tuple[int, ...]
    if part in ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"):
        name, sizes = "linear_attn.in_proj_qkvz", (state.key_size, state.key_size, values, values)
        wanted = (0, 1, 2) if part.endswith("qkv") else (3,)
    elif part in ("linear_attn.in_proj_b", "linear_attn.in_proj_a"):
        name, sizes, wanted = "linear_attn.in_proj_ba", (each, each), (0,) if part.endswith("b") else (1,)
    else:
        return None
    total = state.num_key_heads * sum(sizes)
    by_head = np.arange(total).reshape(state.num_key_heads, -1)
    begins = np.cumsum((0, *sizes))
    rows = [by_head[:, begins[i] : begins[i + 1]].reshape(-1) for i in wanted]
    return name, total, np.concatenate(rows)
