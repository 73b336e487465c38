"""Promise 2 in virtual time: answers of the worst kind, good drafters that nobody knows, and short answers.

The scenarios and limits are those of bench/scripts/worst_answers.py, which runs 200 answers of each. That costs of a
busy first load heal is in test_call_cost.py, and by the clock in bench/scripts/healing.py.
"""

import runpy
from pathlib import Path

import pytest

WORST = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "scripts" / "worst_answers.py"))


@pytest.mark.parametrize("strangers", [False, True], ids=["one engine", "strangers"])
@pytest.mark.parametrize("kind", WORST["KINDS"])
def test_no_answer_is_slower_than_plain_decoding(kind: str, strangers: bool) -> None:
    found = WORST["speeds"](WORST["KINDS"][kind], strangers=strangers, num_answers=6)
    assert min(found) >= WORST["LOWEST"]


@pytest.mark.parametrize("kind", WORST["MODELS"])
def test_a_good_drafter_is_found_in_its_first_answers(kind: str) -> None:
    first, speed = WORST["discovery"](WORST["MODELS"][kind](WORST["GOOD"]), WORST["SHORT_TOKENS"].get(kind, 48))
    assert 1 <= first <= WORST["MOST_ANSWERS"]
    assert speed > 1.04


def test_short_answers_to_long_prompts_lose_little() -> None:
    assert WORST["speed_of"](WORST["mixed"](WORST["SHORT_ANSWERS"][0], 1.0)) >= WORST["SHORT_LOWEST"]
