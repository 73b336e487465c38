"""Predicts what published drafters would give for models with states on this machine: MTP, DFlash, DSpark and DFlash 2.

    python bench/scripts/hybrid_predictions.py FOLDER TOKENIZER [MODEL …]

The main model's calls are timed as by `hybrid_costs.py`, with random weights in the published shapes, and the states
after each row stored. A drafter costs the share of the main model's weights that it reads, with an output matrix of
32,768 tokens: MTP reads one of the main model's layers with attention and a matrix that joins two states for each
token, the others five such layers and a matrix that joins five states for a block. Tokens of a round are the makers',
means of five sets; for smaller models of the family they are those of Qwen3.5-4B. For short drafts, each token is taken
to be accepted with the same chance. So the speed-ups are predictions: nobody has run these drafters here.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from family_sizes import SHAPES  # type: ignore[import-not-found]
from hybrid_costs import CACHE_SIZE, PAST, PROPERTIES, export, measure  # type: ignore[import-not-found]

import outrider
from outrider.drafters import prediction

CUT, LONGEST = 32_768, 7  # tokens of an output matrix, and draft tokens
BLOCK_LAYERS, BLOCK_STATES = 5, 5
QWEN = {"mtp": 4.54, "dflash": 4.92, "dspark": 5.49, "dflash2": 5.97}
TOKENS: dict[str, dict[str, float]] = {"Qwen3.5 0.8B": QWEN, "Qwen3.5 2B": QWEN, "LFM2.5 1.2B": {"dspark": 3.54}}


def weights_of(fields: dict[str, Any], kind: str) -> int:
    """The weights that a drafter reads: of MTP for a token, of the others for a draft."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    size = fields.get("head_dim") or hidden // heads
    wide = fields["intermediate_size"] if fields["kind"] != "lfm2" else 2 * fields["intermediate_size"] // 3
    own, shared = heads * size, fields["num_key_value_heads"] * size
    layer = 2 * hidden * own + 2 * hidden * shared + 3 * hidden * wide
    if kind == "mtp":
        return int(layer + hidden * own + 2 * hidden * hidden + CUT * hidden)  # with the gate of attention
    return int(BLOCK_LAYERS * layer + BLOCK_STATES * hidden * hidden + CUT * hidden)


def best(tokens: float, rows: dict[int, float], share: float, *, at_once: bool) -> prediction.SpeedPrediction:
    """The draft length that pays most.

    tokens: of a round. rows: seconds of calls. share: a draft's, or a draft token's, of a call of one row.
    """
    check = [float(np.interp(count, [*rows], [*rows.values()])) for count in range(1, LONGEST + 2)]
    draft = [rows[1] * share * (1 if at_once else count) for count in range(1, LONGEST + 1)]
    return prediction.best_draft([1 - 1 / tokens] * LONGEST, prediction.Costs(check, draft))


def main(folder: str, tokenizer: str, *names: str) -> None:
    """Print the table."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    print(f"Predicted, in int8, after {PAST} tokens:\n")
    print(
        "| main model | drafter | published tokens a round | best length | predicted speed-up |\n|---|---|---|---|---|"
    )
    for name in names or TOKENS:
        bundle = export(place, Path(tokenizer), name)
        size = sum(path.stat().st_size for path in (bundle / "main").glob("*.bin"))  # a byte for each weight
        with outrider.load(bundle, drafter=None, cache_size=CACHE_SIZE, properties=PROPERTIES) as engine:
            rows = measure(engine)[True]
        for kind, tokens in TOKENS[name].items():
            share = weights_of(SHAPES[name], kind) / size
            found = best(tokens, rows, share, at_once=kind != "mtp")
            print(f"| {name} | `{kind}` | {tokens} | {found.num_draft_tokens} | {found.speed_up:.2f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
