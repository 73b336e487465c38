"""Measured exactness, and that no more is claimed, on fakes that calculate like processors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.tuning.measure.exactness import ROWS, measure_exactness
from outrider.models.tuning.measure.readings import compare_readings
from outrider.testing import FakeBackend
from outrider.types import Chunk, Exactness, Rounding, RowRule

# As measured in bf16 on an Intel Xeon with AMX; numbers that are not listed have bits of their own.
AMX = ((1,), (2, 4), (3,), (5, 6, 12, 15), (7, 9), (8, 16, 24, 32, 40, 48, 64))


def by_groups(groups: Sequence[Sequence[int]]) -> Callable[[int], int]:
    """A kernel for each group; multiples of eight beyond those listed are in the last."""
    known = {rows: i for i, group in enumerate(groups, 1) for rows in group}

    def kernel(rows: int) -> int:
        return known.get(rows) or (len(groups) if rows % 8 == 0 else 100 + rows)

    return kernel


def alone(rows: int) -> int:
    """A single row has another kernel."""
    return int(rows == 1)


def test_rows_that_are_alike_need_no_padding() -> None:
    backend = FakeBackend(40)
    found = measure_exactness(backend)
    assert found.holds
    assert found.rule == RowRule()
    assert found.groups == (ROWS,)


def test_rows_in_eights_are_found() -> None:
    backend = FakeBackend(40, kernels=by_groups(AMX))
    found = measure_exactness(backend)
    assert found.holds
    assert found.rule == RowRule(call=Rounding(8, 8), logits=Rounding(8, 8))
    assert (5, 6, 12, 15) in found.groups
    backend.use(found)
    assert max(compare_readings(backend, 200).values()) == 0
    assert {rows % 8 for rows in backend.num_rows[-50:]} == {0}


def test_a_sequence_alone_is_padded_where_the_attention_asks_for_it() -> None:
    for can_pad_apart in (False, True):
        found = measure_exactness(FakeBackend(40, attention_kernels=alone, can_pad_apart=can_pad_apart))
        assert found.holds
        assert found.rule == RowRule(sequence=Rounding(2), apart=can_pad_apart)
        assert found.rule.num_rows([1, 1, 1]) == (3 if can_pad_apart else 6)


SEPARATE, AMONG = RowRule(separate=True, call=Rounding(2)), RowRule(separate=True, dummy_rows=2)


def test_rows_of_answers_are_read_alone_where_that_is_exact() -> None:
    backend = FakeBackend(40, attention_kernels=alone, separate_rules=(SEPARATE, AMONG))
    found = measure_exactness(backend)
    assert found.holds
    assert found.rule == replace(SEPARATE, sequence=Rounding(2))
    assert found.rule.num_rows([1]) == 2
    assert found.rule.num_rows([1, 1, 5]) == 7
    backend.use(found)
    assert max(compare_readings(backend, 200).values()) == 0


def test_where_single_rows_divide_the_work_others_are_put_beside_them() -> None:
    """As on CPUs: calls of fewer single rows than threads divide each row's work among threads."""
    backend = FakeBackend(
        40, attention_kernels=alone, single_kernels=lambda n: n if n < 4 else 0, separate_rules=(SEPARATE, AMONG)
    )
    found = measure_exactness(backend)
    assert found.holds
    assert found.rule == replace(SEPARATE, sequence=Rounding(2), call=Rounding(4))
    backend.use(found)
    assert max(compare_readings(backend, 200).values()) == 0
    many = FakeBackend(
        40, attention_kernels=alone, single_kernels=lambda n: n if n < 16 else 0, separate_rules=(SEPARATE, AMONG)
    )
    assert measure_exactness(many).rule == replace(AMONG, sequence=Rounding(2))


def test_rows_are_read_alone_though_they_seem_alike() -> None:
    """Threads that take work as they are free change bits now and then, which a measurement may miss."""
    found = measure_exactness(FakeBackend(40, separate_rules=(AMONG,)))
    assert found.groups == (ROWS,)
    assert found.rule == replace(AMONG, sequence=Rounding(2))


@pytest.mark.parametrize("limit", [64, 80, 112, 207])
def test_where_calls_of_many_rows_have_other_bits_no_call_has_as_many(limit: int) -> None:
    """As on a processor with AVX2 alone, where the limit is between 80 and 96 rows."""
    backend = FakeBackend(40, kernels=lambda rows: int(rows > 1) + int(rows > limit), can_divide=True)
    found = measure_exactness(backend)
    assert found.holds
    assert found.rule == RowRule(Rounding(2), most=limit // 16 * 16)
    backend.use(found)
    backend.num_rows.clear()
    assert max(compare_readings(backend, 300).values()) == 0
    assert max(backend.num_rows) == limit // 16 * 16


def test_where_no_padding_helps_nothing_is_claimed() -> None:
    backend = FakeBackend(40, kernels=lambda rows: rows)
    found = measure_exactness(backend)
    assert not found.holds
    assert found.largest_difference > 0.1
    assert found.rule == RowRule()  # which would cost time and promise nothing
    backend.use(found)
    assert not backend.capabilities.bit_exact_batching


def test_states_that_round_at_each_store_are_not_claimed_to_be_exact() -> None:
    """As in bf16: a chain of tokens is calculated on from the state, and single tokens from what was stored of it."""

    class Rounded(FakeBackend):
        def _submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
            for chunk in chunks:
                if chunk.slot.shifts:
                    chunk.slot.shifts[-1] |= 1  # what follows depends on where calls began
            return super()._submit(chunks)

    for separate_rules in ((), (RowRule(separate=True),)):
        found = measure_exactness(Rounded(40, separate_rules=separate_rules))
        assert found.groups == (ROWS,)  # rows of one call are alike
        assert not found.holds
        assert found.largest_difference > 0.1


def test_what_was_not_measured_does_not_hold() -> None:
    assert not Exactness().holds


def test_every_number_of_rows_that_drafts_have_is_read() -> None:
    """Hypothesis found kernels with other bits for 21 to 31 rows alone, when 24 and 32 stood for them."""
    others = {1, 3, 5, 7, *range(21, 32, 2)}
    backend = FakeBackend(24, kernels=lambda rows: int(rows not in others), attention_kernels=alone)
    found = measure_exactness(backend)
    backend.use(found)
    assert found.holds
    assert max(compare_readings(backend, 130).values()) == 0


@settings(max_examples=12)
@given(st.data())
def test_whatever_is_claimed_is_true(data: st.DataObject) -> None:
    """For any kernels of up to 32 rows, either a padding is found that makes all readings equal, or none is claimed."""
    known = data.draw(st.lists(st.integers(0, 2), min_size=32, max_size=32))
    period = data.draw(st.sampled_from([1, 2, 8]))
    beyond = data.draw(st.integers(0, 2))
    limit = data.draw(st.sampled_from([32, 64, 100]))

    def kernels(rows: int) -> int:
        return 3 if rows > limit > 32 else known[rows - 1] if rows % period and rows <= 32 else beyond

    backend = FakeBackend(
        24,
        kernels=kernels,
        attention_kernels=data.draw(st.sampled_from([alone, lambda _: 0])),
        single_kernels=data.draw(st.sampled_from([None, lambda n: n, lambda n: int(n < 3)])),
        separate_rules=data.draw(st.sampled_from([(), (AMONG,), (SEPARATE, AMONG)])),
        can_divide=data.draw(st.booleans()),
    )
    found = measure_exactness(backend)
    backend.use(found)
    if found.holds:
        assert max(compare_readings(backend, 130).values()) == 0
