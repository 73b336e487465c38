"""A check of the certificate: how close a bundle's model is to the checkpoint that it came from.

text = answered(engine, prompt, max_new_tokens=64)
check_cosine("main", found, min_cosine=0.999)    # found: a `Fidelity`, which outrider_export measures
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from outrider.config import GenerationConfig
from outrider_bench.verify.certify import Check

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider_bench.prompts import Prompt
    from outrider_export.fidelity import Fidelity


def answered(engine: Engine, prompt: Prompt, max_new_tokens: int) -> list[int]:
    """The token ids of a prompt and of its greedy answer."""
    token_ids = engine.tokenizer.encode_prompt(prompt.text)
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    return [*token_ids, *engine.generate(token_ids, config).token_ids]


def check_cosine(role: str, found: Fidelity, min_cosine: float | None) -> Check:
    """The check of one model. role: "main" or "draft". min_cosine: the least median that passes; None: report only."""
    detail = (
        f"{found.setting}, against {found.checkpoint} in float32, {found.num_rows:,} rows: cosine median "
        f"{found.median:.5f}, first percentile {found.first_percentile:.5f}, minimum {found.minimum:.5f}; the same "
        f"token on top in {found.top1_agreement:.1%}"
    )
    passed = None if min_cosine is None else found.median >= min_cosine
    if min_cosine is not None:
        detail += f"; fails where the median is below {min_cosine:g}"
    return Check(f"fidelity, {role} model", passed, detail, asdict(found))
