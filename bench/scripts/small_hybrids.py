"""Looks at small trained models with states: what int8 costs, how far they remember, drafts, and texts of 4,000 tokens.

    python bench/scripts/small_hybrids.py FOLDER [KIND …]

FOLDER is that of `train_small_hybrids.py`; the bundles are exported into it, where they stay. The codes are those that
a prompt names at its beginning and asks for at its end, with so many tokens between. Each prompt is answered as it is,
with its beginning from the prefix cache, and from the prefix store by an engine that has just begun: the texts have to
be the same. So do long ones, with each drafter and without.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import outrider
from outrider.types import Chunk

FORMS = ("fp32", "int8", "int4")
DISTANCES, NUM_ASKED = (100, 400, 1600, 3200), 8
NUM_SCORED, SCORED, PIECE = 6, 512, 64  # texts, tokens of each, and tokens of a call
NUM_LONG, LONG = 1, 4000
PLACES = ("Oslo", "Lima", "Cairo", "Quito", "Accra", "Delhi", "Seoul", "Paris")


def export(folder: Path, kind: str, form: str) -> Path:
    """The bundle of a checkpoint in a form, which is made if it is not there."""
    made = folder / "bundles" / f"{kind}-{form}"
    if not made.exists():
        command = [sys.executable, "-m", "outrider", "export", str(folder / kind), "--weights", form, "-o", str(made)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return made


def distributions(bundle: Path, texts: Any) -> Iterator[Any]:
    """Log-probabilities float32 [PIECE, vocabulary] of texts, piece by piece."""
    with outrider.load(bundle, drafter=None) as engine:
        backend: Any = engine.main
        for text in texts:
            slot = backend.open(SCORED + 1)
            for begin in range(0, SCORED, PIECE):
                chunk = Chunk(slot, text[begin : begin + PIECE].tolist(), PIECE)
                logits = np.stack([row.full() for row in backend.submit([chunk]).wait().rows(chunk)]).astype(np.float32)
                logits -= logits.max(-1, keepdims=True)
                yield logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            slot.close()


def compare(of_form: Iterator[Any], of_source: list[Any], texts: Any) -> tuple[float, float]:
    """The mean KL divergence from the source in nats, and the mean loss per token."""
    divergence, loss, count = 0.0, 0.0, 0
    wanted = np.concatenate([text[1 : SCORED + 1] for text in texts]).reshape(-1, PIECE)
    for found, right, tokens in zip(of_form, of_source, wanted, strict=True):
        divergence += float((np.exp(right) * (right - found)).sum(-1).mean())
        loss -= float(found[np.arange(PIECE), tokens].mean())
        count += 1
    return divergence / count, loss / count


def questions(engine: outrider.Engine, texts: Any, distance: int) -> Iterator[tuple[list[int], str]]:
    """Prompts that name a code, go on with so many tokens of other text, and ask for it; and the code."""
    chosen, encode = random.Random(distance), engine.tokenizer.encode

    def turn(question: str, answer: str) -> str:
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}"

    for i in range(NUM_ASKED):
        place, code = chosen.choice(PLACES), f"{chosen.randrange(10_000):04}"
        others = [texts[(i + k) % len(texts)] for k in range(3)]
        middle = [int(token_id) for token_id in np.concatenate([others[0][300:1700], *others[1:]])[:distance]]
        begin = encode(turn(f"The code of {place} is {code}.", "I will remember it.<|im_end|>\n"))
        end = encode("<|im_end|>\n" + turn(f"What is the code of {place}?", f"The code of {place} is"))
        yield [*begin, *middle, *end], code


def remembered(bundle: Path, texts: Any, store: str) -> tuple[list[str], int]:
    """How many codes are remembered, by distance; and how many texts differ by where the prompt's beginning is from."""
    found, wrong, cold = list[str](), 0, dict[tuple[int, ...], Any]()
    with outrider.load(bundle, prefix_store=store) as engine:
        for distance in DISTANCES:
            asked = [*questions(engine, texts, distance)]
            right = 0
            for prompt, code in asked:
                result = engine.generate(prompt, max_new_tokens=6, drafter=None)
                cold[tuple(prompt)] = result.token_ids
                right += code in result.text
            found.append(f"{right}/{len(asked)}")
        wrong += differing(engine, cold)
    with outrider.load(bundle, prefix_store=store) as engine:
        wrong += differing(engine, cold)
    return found, wrong


def differing(engine: outrider.Engine, cold: dict[tuple[int, ...], Any]) -> int:
    """How many texts differ from those of prompts that were read whole. Says which ones are read whole again."""
    count = 0
    for prompt, right in cold.items():
        result = engine.generate(list(prompt), max_new_tokens=6)
        count += result.token_ids != right
        if not result.stats.num_cached_tokens:
            print(f"{len(prompt)} tokens were read again", file=sys.stderr)
    return count


def long_texts(bundle: Path, texts: Any) -> tuple[int, int, dict[str, float]]:
    """How many texts of LONG tokens differ, of how many; and the tokens of a round, by drafter."""
    differ, count, rounds = 0, 0, dict[str, list[float]]()
    with outrider.load(bundle, cache_size=2) as engine:
        for text in texts[:NUM_LONG]:
            options: dict[str, Any] = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0.8, "seed": 1}
            plain = engine.generate(text[:200].tolist(), drafter=None, **options)
            for name in ("auto", *engine.drafters):
                length = "auto" if name == "auto" else 2
                result = engine.generate(text[:200].tolist(), drafter=name, num_assistant_tokens=length, **options)
                differ, count = differ + (result.token_ids != plain.token_ids), count + 1
                rounds.setdefault(name, []).append(result.stats.tokens_per_round)
    return differ, count, {name: float(np.mean(each)) for name, each in rounds.items()}


def main(folder: str, *kinds: str) -> None:
    """Print the tables."""
    place = Path(folder)
    texts = safetensors.numpy.load_file(place / "texts.safetensors")["texts"][:32]  # which no training saw
    scored = texts[:NUM_SCORED]
    columns = ["model", "form", "loss", "KL to fp32, nats", *(f"code {distance} tokens ago" for distance in DISTANCES)]
    columns += ["texts that differ: prefixes", f"of {LONG} tokens", "tokens of a round"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for kind in kinds or sorted(path.parent.name for path in place.glob("*/config.json")):
        source = [*distributions(export(place, kind, "fp32"), scored)]
        for form in FORMS:
            bundle = export(place, kind, form)
            divergence, loss = compare(distributions(bundle, scored), source, scored)
            found, wrong = remembered(bundle, texts, str(place / "bundles" / f"{kind}-{form}-prefixes"))
            cells = [kind, form, f"{loss:.3f}", f"{divergence:.4f}", *found]
            cells += [f"{wrong}/{2 * len(DISTANCES) * NUM_ASKED}"]
            if form != "fp32":
                differ, count, rounds = long_texts(bundle, texts)
                cells += [f"{differ}/{count}", ", ".join(f"{name} {each:.2f}" for name, each in rounds.items())]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
