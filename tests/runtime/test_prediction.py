"""What drafts gain, predicted from costs and acceptance."""

import pytest

from outrider.drafters.prediction import Costs, SpeedPrediction, best_draft, needed, predict, predictions

COSTS = Costs(check=[10.0, 10.0, 11.0, 12.0], draft=[1.0, 2.0, 6.0])


def test_the_best_draft_length_is_found_by_the_costs() -> None:
    """Tokens per round by hand: 1 + 0.8 = 1.8; + 0.8 · 0.5 = 2.2; + 0.8 · 0.5 · 0.5 = 2.4."""
    found = predict([0.8, 0.5, 0.5], COSTS)
    assert found.num_draft_tokens == 2
    assert found.tokens_per_round == pytest.approx(2.2)
    assert found.speed_up == pytest.approx(2.2 * 10 / 13)


def test_plain_decoding_is_chosen_where_no_draft_pays() -> None:
    costs = Costs([10.0, 11.0, 12.0], [5.0, 6.0])
    assert predict([0.1, 0.1], costs) == predict([], costs) == SpeedPrediction(0, 1.0, 1.0)
    assert best_draft([0.1, 0.1], costs).speed_up == pytest.approx(1.1 * 10 / 16)


@pytest.mark.parametrize("length", [None, 1, 2, 3])
def test_the_acceptance_that_is_needed_is_where_drafts_begin_to_pay(length: int | None) -> None:
    def best(share: float) -> float:
        found = predictions([share] * 3, COSTS)
        return max(each.speed_up for each in found if length in (None, each.num_draft_tokens))

    share = needed(1.0, COSTS, length)
    assert share is not None
    assert best(share) >= 1 > best(share - 0.01)


def test_at_the_break_even_drafts_are_as_fast_as_plain_decoding() -> None:
    for made in predictions([0.9, 0.4, 0.7], COSTS):
        assert made.speed_up * COSTS.break_even(made.num_draft_tokens) == pytest.approx(made.tokens_per_round)
    assert COSTS.break_even(3) == pytest.approx(1.8)  # 12 + 6 by hand
    assert needed(1.0, Costs([10.0, 30.0], [10.0])) is None
