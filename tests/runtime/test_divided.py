"""Calls of more rows than a rule allows are made as several calls, with the rows of one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.backends.divided import divide
from outrider.models.backends.paged_call import PagedCall
from outrider.testing.fake import FakeBackend
from outrider.types import Chunk, Exactness, Rounding, RowRule, Span

RULES = [
    RowRule(most=64),
    RowRule(Rounding(2), call=Rounding(2), most=80),
    RowRule(Rounding(8, 8), call=Rounding(8, 8), most=80),
    RowRule(call=Rounding(32, 32), most=80),
    RowRule(Rounding(2), separate=True, dummy_rows=2, most=64),
    RowRule(Rounding(2), separate=True, call=Rounding(2), most=96),
]


@settings(max_examples=40)
@given(st.data())
def test_rows_and_hidden_states_are_those_of_one_call_and_no_call_has_more_rows(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(RULES))
    sizes = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    wanted = [data.draw(st.integers(0, size)) for size in sizes]
    generated = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    rng = np.random.default_rng(0)
    texts = [rng.integers(24, size=size).tolist() for size in sizes]
    whole, parted = (FakeBackend(24, features=("h",), can_divide=True) for _ in range(2))
    parted.use(Exactness(rule=rule))
    results = []
    for backend in (whole, parted):
        chunks = [
            Chunk(backend.open(300), text, num_rows, ("h",), generated=is_answer)
            for text, num_rows, is_answer in zip(texts, wanted, generated, strict=True)
        ]
        if backend is parted:
            for call in divide(chunks, rule):
                assert len(PagedCall.of([_readable(each) for each in call], rule, 32).token_ids) <= rule.most
        step = backend.submit(chunks).wait()
        rows = [row.full() for chunk in chunks for row in step.rows(chunk)]
        results.append((rows, [step.features(chunk) for chunk in chunks]))
        assert [chunk.slot.length for chunk in chunks] == sizes
    for one, other in zip(*results, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_span_that_is_whole_is_alone_in_its_call_if_it_has_more_rows() -> None:
    class Slot:
        length = 10
        embeds = (
            Span(30, np.zeros((20, 4), np.float32), b"cat", whole=True),
            Span(60, np.zeros((80, 4), np.float32), b"dog", whole=True),
        )

    for rule, expected in (
        (RowRule(most=64), [50, 80, 40]),
        (RowRule(Rounding(8, 8), call=Rounding(8, 8), most=80), [50, 80, 40]),
        (RowRule(most=90), [50, 90, 30]),
        (RowRule(most=200), [170]),
    ):
        calls = divide([Chunk(Slot(), [1] * 170, 1)], rule)
        assert [[len(chunk.token_ids) for chunk in call] for call in calls] == [[count] for count in expected]
        assert [call[-1].num_rows for call in calls] == [0] * (len(calls) - 1) + [1]


def _readable(chunk: Chunk) -> Chunk:
    """The same chunk, in a slot with blocks."""

    class Blocks:
        length, first_position, adapter = 0, 0, None
        blocks, branch_blocks, state_calls = np.arange(10, dtype=np.int32), (), ()

    return Chunk(Blocks(), chunk.token_ids, chunk.num_rows, generated=chunk.generated)


def test_a_tree_stays_whole() -> None:
    backend = FakeBackend(24)
    tree = Chunk(backend.open(300), [1, 2, 3, 4], 4, parents=[-1, -1, 0])  # two branches: 5 rows
    prompt = Chunk(backend.open(300), [5] * 130, 1)
    calls = divide([prompt, tree], RowRule(most=64))
    assert [[len(chunk.token_ids) for chunk in call] for call in calls] == [[64], [64], [2, 4]]
    calls = divide([Chunk(prompt.slot, [5] * 60, 1), tree], RowRule(most=64))
    assert [[len(chunk.token_ids) for chunk in call] for call in calls] == [[60], [4]]
