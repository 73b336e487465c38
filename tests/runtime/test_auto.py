"""The controller in the engine, with a draft model that seems fast. Its choices must not change the text."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.decoding.own import inner
from outrider.drafters.controller import Controller, Fixed
from outrider.drafters.controller.acceptance import Share
from outrider.drafters.controller.ledger import Ledger
from outrider.models.cost.table import LONGEST
from outrider.testing import save_toy_bundle
from outrider.tokens.verifiers import Coupled, Greedy
from toys import fix_costs, load_toy

pytestmark = pytest.mark.any_format


PROMPTS = ["hello", "abcabcabcabc", "the same the same the same", "0123456789" * 8]


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys' calls do not take the seconds that they are said to take, so these are not judged by the clock."""
    monkeypatch.setattr(Ledger, "_take", lambda *_: None)


@pytest.fixture(scope="module")
def engine(toy_bundle: Bundle) -> outrider.Engine:
    """A toy pair with the costs of a real pair, and a draft model that is known to be good.

    The toy's own calls all take the same time, so nothing would be drafted.
    """
    engine = load_toy(toy_bundle, cache_size=0.02)
    fix_costs(engine, (0.040, 0.050), (0.004, 0.005))
    for verifier in (Greedy(), Coupled()):
        record = engine._registry._records_of("auto").of_model(verifier, "draft")
        record.share = Share(0.8, weight=300.0, memory=0.999)
    return engine


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", ["auto", "draft", "suffix", "ngram"])
def test_text_is_that_of_plain_decoding(engine: outrider.Engine, drafter: str, options: dict[str, Any]) -> None:
    fixed: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True} | options
    plain = [engine.generate(prompt, drafter=None, **fixed).token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: engine.generate(prompt, drafter=drafter, **fixed), PROMPTS))
    alone = [engine.generate(prompt, drafter=drafter, **fixed) for prompt in PROMPTS]
    assert [result.token_ids for result in together] == plain
    assert [result.token_ids for result in alone] == plain
    assert sum(result.stats.num_draft_tokens for result in (*together, *alone)) > 0


def test_drafts_grow_with_what_they_earn(tmp_path: Path) -> None:
    """The draft model equals the main model: its confidences are low, and nearly all its tokens are accepted."""
    bundle = save_toy_bundle(tmp_path / "bundle", draft_noise=0.0)
    engine = load_toy(bundle, cache_size=0.01)
    fix_costs(engine, (0.040, 0.042), (0.001, 0.001))
    stats = engine.generate("hello", drafter="draft", max_new_tokens=400, ignore_eos=True).stats
    assert stats.acceptance_rate > 0.8
    assert stats.num_draft_tokens_per_round[0] < LONGEST
    assert max(stats.num_draft_tokens_per_round[-10:-1]) == LONGEST


def test_an_apps_own_drafter_that_says_its_price_is_controlled(engine: outrider.Engine) -> None:
    """Its class does not matter, only what it declares."""
    bundled = engine.draft_models["draft"]
    engine.add_drafter("priced", bundled.on(bundled.backend, bundled.cost))
    request = engine.prepare("hello", drafter="priced").request
    assert isinstance(request.policy, Controller)
    assert [*map(inner, request.policy.drafters)] == [engine.find_drafter("priced")]
    assert request.num_assistant_tokens == LONGEST
    assert isinstance(engine.prepare("hello", drafter="priced", num_assistant_tokens=2).request.policy, Fixed)
    plain = engine.generate("hello", drafter=None, max_new_tokens=60, ignore_eos=True)
    drafted = engine.generate("hello", drafter="priced", max_new_tokens=60, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0
