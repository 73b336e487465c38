"""The certificate: what Outrider promises about its output, tried on this device with these models.

checks = [check_batching(engine.main, vocab_size), check_greedy(engine, prompts, 64), …]
all(check.passed for check in checks)
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.config import GenerationConfig
from outrider.engine import Engine
from outrider.sampling import LogitsSampler
from outrider.testing import ToyTokenizer, save_toy_bundle
from outrider.types import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.bench.prompts import Prompt
    from outrider.config import Config
    from outrider.types import Backend

FALSE_ALARM = 1e-4  # the chance that a correct sampler fails the chi-square test
LENGTHS = (1, 2, 3, 5, 8)  # draft tokens a round


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: whether it held, in words and in figures."""

    name: str
    passed: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


def check_batching(main: Backend, vocab_size: int, length: int = 140) -> Check:
    """Whether a row's logits have the same bits whatever runs with it: the ground that identical text stands on.

    Random tokens are read whole, in pieces of several sizes, with another sequence beside them, and with wrong drafts
    behind every token; the largest difference to the whole reading must be 0.
    """
    token_ids = np.random.default_rng(0).integers(vocab_size, size=length).tolist()
    whole = _rows(main, token_ids, [length])
    differences = {
        f"pieces of {size}": _difference(_rows(main, token_ids, [size] * math.ceil(length / size)), whole)
        for size in (100, 64, 33, 16, 2, 1)
    }
    differences["beside another sequence"] = _difference(
        _rows(main, token_ids, [60, 80], beside=token_ids[::-1]), whole
    )
    differences |= {f"{n} wrong drafts": _wrong_drafts(main, token_ids, whole, n) for n in (1, 3, 8, 15)}
    worst = max(differences, key=lambda name: differences[name])
    passed = differences[worst] == 0
    detail = "bit-identical" if passed else f"logits differ by up to {differences[worst]:.3g}: {worst}"
    return Check("batch invariance", passed, detail, {"largest_difference": differences})


def check_greedy(
    engine: Engine, prompts: Seq[Prompt], max_new_tokens: int, advance: Callable[[], None] = lambda: None
) -> Check:
    """Whether greedy text with any drafter and draft length is that of plain decoding.

    `advance` is called len(engine.drafters) * len(LENGTHS) times for each prompt.
    """
    return _check_identity(engine, "greedy identity", prompts, [{}], max_new_tokens, advance)


def check_coupled(
    engine: Engine,
    prompts: Seq[Prompt],
    max_new_tokens: int,
    seeds: Seq[int] = (0, 1),
    advance: Callable[[], None] = lambda: None,
) -> Check:
    """The same for coupled sampling at temperature 0.7 and top-p 0.9, for every seed; `advance` likewise."""
    settings = [{"temperature": 0.7, "top_p": 0.9, "sampling": "coupled", "seed": seed} for seed in seeds]
    return _check_identity(engine, "coupled identity", prompts, settings, max_new_tokens, advance)


def check_rejection(config: Config, num_samples: int = 2000, num_tokens: int = 3) -> Check:
    """Whether rejection sampling has the main model's distribution, on a built-in toy pair on the same device.

    The first tokens of many answers against their exact joint distribution, by enumeration.
    """
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bundle = save_toy_bundle(Path(folder) / "toy", vocab_size=16, draft_noise=0.15)
        toy = Engine(bundle, config.replace(drafter="auto", cache_size=0.01), tokenizer=ToyTokenizer())
        generation = GenerationConfig(  # not the config's own, whose token ids are another vocabulary's
            temperature=1.0, top_p=0.95, sampling="rejection", ignore_eos=True, max_new_tokens=num_tokens + 2
        )
        exact = exact_joint(toy, prompt, generation, num_tokens)
        answers: Counter[tuple[int, ...]] = Counter()
        accepted = drafted = 0
        for seed in range(num_samples):
            result = toy.generate(prompt, generation, seed=seed)
            answers[tuple(result.token_ids[:num_tokens])] += 1
            accepted += result.stats.num_accepted_tokens
            drafted += result.stats.num_draft_tokens
        del toy
    p_value, distance = chi_square_p_value(answers, exact), total_variation(answers, exact)
    expected = expected_total_variation(exact, num_samples)
    return Check(
        "rejection sampling",
        p_value > FALSE_ALARM,
        f"chi-square p = {p_value:.3g} (fails below {FALSE_ALARM:g}); total variation {distance:.3f}, where exact "
        f"samples give {expected:.3f}; {accepted / max(drafted, 1):.0%} of {drafted:,} draft tokens accepted",
        {"p_value": p_value, "total_variation": distance, "expected_total_variation": expected, "samples": num_samples},
    )


def exact_joint(
    engine: Engine, prompt: list[int], config: GenerationConfig, num_tokens: int
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `num_tokens` tokens, from the main model's own logits."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for start, probability in joint.items():
            logits = _rows(engine.main, [*prompt, *start], [len(prompt) + len(start)])[-1]
            row = LogitsSampler(config, prompt).distribution(logits, start)
            for token_id, p in zip(row.token_ids.tolist(), row.probs.tolist(), strict=True):
                if probability * p > 1e-9:
                    longer[(*start, token_id)] = probability * p
        joint = longer
    return joint


def chi_square_p_value(counts: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's test; cells expected fewer than five times are pooled. 0 where something impossible was drawn.

    Upper tail by Wilson and Hilferty's approximation (1931).
    """
    if not set(counts) <= set(exact):
        return 0.0
    total = sum(counts.values())
    pairs = [(counts.get(cell, 0), total * probability) for cell, probability in exact.items()]
    cells = [pair for pair in pairs if pair[1] >= 5]
    rest = [pair for pair in pairs if pair[1] < 5]
    pooled = (sum(count for count, _ in rest), sum(expected for _, expected in rest))
    if pooled[1] >= 5:
        cells.append(pooled)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    degrees = len(cells) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    return 0.5 * math.erfc(z / 2**0.5)


def total_variation(counts: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Half the sum of absolute differences between observed shares and probabilities."""
    total = sum(counts.values())
    cells = set(counts) | set(exact)
    return 0.5 * sum(abs(counts.get(cell, 0) / total - exact.get(cell, 0.0)) for cell in cells)


def expected_total_variation(exact: Mapping[tuple[int, ...], float], num_samples: int) -> float:
    """What `total_variation` is on average for exact samples: it is never 0, and shrinks with their number."""
    probs = np.array(list(exact.values()))
    rng = np.random.default_rng(0)
    draws = rng.multinomial(num_samples, probs / probs.sum(), size=50)
    return float(0.5 * np.abs(draws / num_samples - probs).sum(axis=1).mean())


def _check_identity(
    engine: Engine,
    name: str,
    prompts: Seq[Prompt],
    settings: Seq[dict[str, Any]],
    max_new_tokens: int,
    advance: Callable[[], None],
) -> Check:
    num_runs, num_drafted, differing = 0, 0, []
    for prompt in prompts:
        token_ids = engine.tokenizer.encode_prompt(prompt.text)
        for options in settings:
            request = options | {"max_new_tokens": max_new_tokens}
            plain = engine.generate(token_ids, drafter=None, **request).token_ids
            for drafter in engine.drafters:
                for length in LENGTHS:
                    result = engine.generate(token_ids, drafter=drafter, num_assistant_tokens=length, **request)
                    num_runs += 1
                    num_drafted += result.stats.num_draft_tokens
                    if result.token_ids != plain:
                        where = {"prompt": prompt.id, "drafter": drafter, "num_assistant_tokens": length} | options
                        differing.append(where | _first_difference(engine, token_ids, plain, result.token_ids))
                    advance()
    detail = (
        f"{num_runs - len(differing)} of {num_runs} runs identical to plain decoding, {num_drafted:,} tokens drafted"
    )
    if differing:
        first = differing[0]
        detail += (
            f"; first at token {first['position']} of prompt {first['prompt']}, logit gap {first['logit_gap']:.3g}"
        )
    return Check(name, not differing, detail, {"num_runs": num_runs, "differing": differing})


def _first_difference(engine: Engine, prompt: list[int], plain: list[int], other: list[int]) -> dict[str, Any]:
    """Where two answers part, and how far apart the main model's logits for the two tokens are there."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    gap = 0.0
    if at < min(len(plain), len(other)):
        context = [*prompt, *plain[:at]]
        logits = _rows(engine.main, context, [len(context)], last_only=True)[-1]
        gap = abs(float(logits[plain[at]] - logits[other[at]]))
    return {"position": at, "logit_gap": gap}


def _rows(
    main: Backend, token_ids: list[int], sizes: list[int], *, beside: list[int] | None = None, last_only: bool = False
) -> NDArray[np.float32]:
    """Logits float32 [rows, vocab_size] of tokens read in chunks of these sizes, perhaps with another sequence."""
    slots = [main.open(len(token_ids)) for _ in range(2 if beside else 1)]
    rows = []
    try:
        for size in sizes:
            chunks = []
            for slot, source in zip(slots, (token_ids, beside or []), strict=False):
                if slot is None:
                    raise AssertionError("the cache has no room: nothing else may run beside a certificate")
                chunk = source[slot.length : slot.length + size]
                chunks.append(Chunk(slot, chunk, num_rows=1 if last_only else len(chunk)))
            step = main.submit(chunks).wait()
            rows += [step.logits(i).copy() for i in range(chunks[0].num_rows)]
    finally:
        for slot in slots:
            if slot:
                slot.close()
    return np.array(rows)


def _wrong_drafts(main: Backend, token_ids: list[int], whole: NDArray[np.float32], num_drafts: int) -> float:
    """Decode the second half token by token, with drafts that are rejected behind each: the largest difference."""
    slot = main.open(len(token_ids) + num_drafts)
    if slot is None:
        raise AssertionError("the cache has no room: nothing else may run beside a certificate")
    half = len(token_ids) // 2
    main.submit([Chunk(slot, token_ids[:half], num_rows=0)]).wait()
    rows = []
    for i in range(half, len(token_ids)):
        step = main.submit([Chunk(slot, [token_ids[i], *token_ids[:num_drafts]], num_rows=num_drafts + 1)]).wait()
        rows.append(step.logits(0).copy())
        slot.trim(i + 1)
    slot.close()
    return _difference(np.array(rows), whole[half:])


def _difference(rows: NDArray[np.float32], whole: NDArray[np.float32]) -> float:
    return float(np.abs(rows - whole).max())
