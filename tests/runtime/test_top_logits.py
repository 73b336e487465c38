"""Decisions from a row's largest logits equal decisions from the whole row, bit for bit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops

import outrider
from outrider.bundle import Bundle
from outrider.config import GenerationConfig
from outrider.drafters import Subset
from outrider.errors import DeviceError, NoTokenLeft, OptionError
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import TOP, add_top_logits
from outrider.models.backends.paged_step import PagedStep
from outrider.models.measure.slots import open_slot
from outrider.testing import save_toy_bundle
from outrider.tokens.sampling import LogitsSampler, argmax, probability, whole_row
from outrider.types import Chunk, Logits, LogitsRow, TopLogits
from toys import load_toy

VOCAB_SIZE = 60


def top_of(row: Logits, k: int, seed: int = 0) -> TopLogits:
    """A device's largest logits. Its choice among equal ones, and the rounding of its sum, are random."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(row)), -row))
    token_ids = np.sort(order[:k])
    with np.errstate(all="ignore"):
        logsumexp = float(np.logaddexp.reduce(row.astype(np.float64))) + rng.uniform(-2e-5, 2e-5)
    return TopLogits(token_ids, row[token_ids], float(row[order[k - 1]]), logsumexp, len(row))


def listed(row: Logits, top: TopLogits | None) -> LogitsRow:
    return LogitsRow(lambda: row, top)


def unread() -> Logits:
    raise AssertionError("the whole row was asked for")


def made_row(seed: int, spread: float, tied: bool, with_gaps: bool) -> Logits:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, VOCAB_SIZE).astype(np.float32)
    if tied:
        row = np.round(row)
    if with_gaps:
        row[rng.random(VOCAB_SIZE) < 0.3] = -np.inf
        row[0] = max(row[0], np.float32(-9))
    return row


rows = st.builds(made_row, st.integers(0, 2**20), st.sampled_from([0.3, 2.0, 9.0]), st.booleans(), st.booleans())
token_ids_of = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
options_of = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.just(1.0), st.floats(0.05, 5)),
        "top_k": st.sampled_from([0, 0, 1, 3, 8, 20, 59, 60, 99]),
        "top_p": st.one_of(st.just(1.0), st.floats(0.05, 1), st.sampled_from([1 - 1e-9, 1 - 1e-15])),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
        "typical_p": st.sampled_from([1.0, 1.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.8, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -0.5, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=2),
        "banned_token_ids": token_ids_of.map(tuple),
        "no_repeat_ngram_size": st.sampled_from([0, 0, 1, 2]),
    }
)


@settings(max_examples=300)
@given(rows, st.integers(1, VOCAB_SIZE), options_of, token_ids_of, token_ids_of, st.integers(0, 99))
def test_decisions_are_those_of_the_whole_row(
    row: Logits, k: int, options: dict[str, Any], prompt: list[int], prefix: list[int], seed: int
) -> None:
    sampler = LogitsSampler(GenerationConfig(**options), prompt)
    reduced = listed(row, top_of(row, k, seed))
    try:
        whole = LogitsRow.of(row)
        best, expected = sampler.best(whole, prefix), sampler.distribution(whole, prefix)
    except NoTokenLeft:
        with pytest.raises(NoTokenLeft):
            sampler.best(reduced, prefix)
        with pytest.raises(NoTokenLeft):
            sampler.distribution(reduced, prefix)
        return
    made = sampler.distribution(reduced, prefix)
    assert sampler.best(reduced, prefix) == best
    assert argmax(reduced) == int(row.argmax())
    np.testing.assert_array_equal(made.token_ids, expected.token_ids)
    np.testing.assert_array_equal(made.probs, expected.probs)
    assert made.token_ids.dtype == expected.token_ids.dtype


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 3.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 0.5, "top_p": 0.5},
        {"temperature": 1.5, "top_p": 0.1},
        {"temperature": 0.7, "min_p": 0.2},
        {"temperature": 0.01},
        {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.2, "banned_token_ids": [1]},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {3: -1.0}, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_usual_options_do_without_the_whole_row(options: dict[str, Any]) -> None:
    """For a row whose ten likeliest tokens stand out, as in most rows."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, 50_000).astype(np.float32)
    logits[rng.permutation(50_000)[:10]] += np.linspace(12, 16, 10, dtype=np.float32)
    row = LogitsRow(unread, top_of(logits, 64))
    sampler = LogitsSampler(GenerationConfig(**options), [1, 2, 3])
    assert sampler.best(row, [5]) == sampler.best(LogitsRow.of(logits), [5])
    best = argmax(row)
    assert best == logits.argmax()
    assert probability(row, best) == pytest.approx(probability(LogitsRow.of(logits), best), rel=1e-4)
    if options.get("temperature"):
        made, expected = sampler.distribution(row, [5]), sampler.distribution(LogitsRow.of(logits), [5])
        np.testing.assert_array_equal(made.probs, expected.probs)


def test_a_cut_that_hangs_on_rounding_is_the_whole_rows() -> None:
    """All logits that are not listed are −inf, and top-p ends exactly between two tokens."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        row = np.full(300, -np.inf, dtype=np.float32)
        ids = np.sort(rng.permutation(300)[:40])
        row[ids] = rng.normal(0, 9, 40)
        weights = np.exp(row - row.max())
        mass = np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
        tops = (top_of(row, 50), whole_row(ids, row[ids], len(row)))
        for top_p in mass[:20] / weights.sum(dtype=np.float64):
            sampler = LogitsSampler(GenerationConfig(temperature=1.0, top_p=float(top_p)), [])
            expected = sampler.distribution(LogitsRow.of(row), [])
            for top in tops:
                made = sampler.distribution(listed(row, top), [])
                np.testing.assert_array_equal(made.token_ids, expected.token_ids)
                np.testing.assert_array_equal(made.probs, expected.probs)


def test_a_cut_vocabulary_is_enough_and_little_of_it_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device lists all of the row's logits, so the whole row adds nothing, and the likeliest few decide."""
    logits = np.random.default_rng(0).normal(0, 3, 64_000).astype(np.float32)
    row = LogitsRow(unread, whole_row(np.arange(64_000), logits, 150_000))
    lengths: list[int] = []
    sort = np.lexsort

    def watched(keys: Any) -> Any:
        lengths.append(len(keys[0]))
        return sort(keys)

    monkeypatch.setattr(np, "lexsort", watched)
    options: dict[str, Any]
    for options in ({"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.01}, {}):
        sampler = LogitsSampler(GenerationConfig(temperature=0.7, **options), [])
        expected = sampler.distribution(LogitsRow.of(logits), [])
        lengths.clear()
        np.testing.assert_array_equal(sampler.distribution(row, []).probs, expected.probs)
        assert sum(lengths) < 6_400


def test_weights_near_the_smallest_number_are_judged_as_rounded() -> None:
    """A token that is not listed may be kept by a min-p that single precision rounds down."""
    for min_p in (0.0, 1e-45, 2e-45, 5e-45, 3e-44, 1e-43):
        sampler = LogitsSampler(GenerationConfig(temperature=1.0, min_p=min_p), [])
        for below in np.linspace(98, 104, 400):
            logits = np.array([0, -1, -below, -below], dtype=np.float32)
            made = sampler.distribution(listed(logits, top_of(logits, 3)), [])
            np.testing.assert_array_equal(made.token_ids, sampler.distribution(LogitsRow.of(logits), []).token_ids)


def test_a_sum_is_as_exact_as_single_precision_can_say() -> None:
    """Far from 0, the logsumexp of logits has few digits after the point."""
    rng = np.random.default_rng(0)
    for offset in (0.0, 3e3, -3e4, 2e5):
        for seed in range(20):
            row = (rng.normal(0, 2, 200) + offset).astype(np.float32)
            exact = top_of(row, 60, seed)
            for step in (-1, 0, 1):  # a device rounds one way or the other
                logsumexp = exact.logsumexp + 0.9 * step * float(np.spacing(np.float32(exact.logsumexp)))
                top = dataclasses.replace(exact, logsumexp=logsumexp)
                for top_p in (0.1, 0.3, 0.5, 0.7):
                    sampler = LogitsSampler(GenerationConfig(temperature=1.0, top_p=top_p), [])
                    made = sampler.distribution(listed(row, top), [])
                    np.testing.assert_array_equal(made.token_ids, sampler.distribution(LogitsRow.of(row), []).token_ids)


@pytest.mark.parametrize("options", [{"logit_bias": {3: 1.0}}, {"repetition_penalty": 0.9}, {"presence_penalty": -1}])
def test_options_that_raise_logits_ask_for_the_whole_row(options: dict[str, Any]) -> None:
    logits = np.arange(100, dtype=np.float32)
    sampler = LogitsSampler(GenerationConfig(**options), [3])
    with pytest.raises(AssertionError, match="the whole row was asked for"):
        sampler.best(LogitsRow(unread, top_of(logits, 9)), [])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_fails_as_it_would(bad: float) -> None:
    """Whichever logits a device lists, its sum shows the error."""
    logits = np.zeros(50, dtype=np.float32)
    logits[30] = bad
    top = TopLogits(np.arange(5), np.ones(5, dtype=np.float32), 0.0, float("nan"), 50)
    sampler = LogitsSampler(GenerationConfig(temperature=1.0, top_k=2), [])
    with pytest.raises(DeviceError, match="not finite"):
        sampler.best(listed(logits, top), [])
    with pytest.raises(DeviceError, match="not finite"):
        sampler.distribution(listed(logits, top), [])


@given(
    row=rows,
    k=st.none() | st.integers(1, VOCAB_SIZE),
    top_k=st.sampled_from([0, 5, 199]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_a_cut_output_matrix_keeps_its_ids(row: Logits, k: int | None, top_k: int, top_p: float) -> None:
    """k: logits that the device lists; None for a device that gives the whole row."""
    ids = np.sort(np.random.default_rng(k).permutation(200)[:VOCAB_SIZE]).astype(np.int32)
    subset = Subset(ids, 200)
    wide = subset.row(listed(row, None if k is None else top_of(row, k)))
    expected = subset.widen(row).copy()
    config = GenerationConfig(temperature=0.7, top_k=top_k, top_p=top_p)
    for sampler in (LogitsSampler(config, []), LogitsSampler(config.replace(repetition_penalty=1.2), [*range(50)])):
        assert sampler.best(wide, [7]) == sampler.best(LogitsRow.of(expected), [7])
        made, whole = sampler.distribution(wide, []), sampler.distribution(LogitsRow.of(expected), [])
        np.testing.assert_array_equal(made.token_ids, whole.token_ids)
        np.testing.assert_array_equal(made.probs, whole.probs)
    likeliest = int(expected.argmax())
    assert argmax(wide) == likeliest
    assert probability(wide, likeliest) == pytest.approx(probability(LogitsRow.of(expected), likeliest), rel=1e-4)


# In the graph


def reduced_by_openvino(rows: np.ndarray, k: int, vocab_size: int) -> list[TopLogits]:
    """rows: float32 [r, width]."""
    parameter = ops.parameter([-1, 1, rows.shape[1]], np.float32)
    logits = ops.multiply(parameter, ops.constant(np.float32(-1)))  # something to come from
    logits.output(0).set_names({"logits"})
    model = ov.Model([ops.result(logits)], [parameter])
    add_top_logits(model, k, vocab_size)
    request = ov.Core().compile_model(model, "CPU").create_infer_request()
    request.infer([-rows[:, None]])
    token_ids, values, sums = (request.get_tensor(name).data[:, 0] for name in TOP)
    step = PagedStep(unread_row, vocab_size, (token_ids, values, sums[:, 0]))
    tops = [step.row(i).top for i in range(len(rows))]
    return [top for top in tops if top is not None]


def unread_row(i: int) -> Logits:
    return unread()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("k", "vocab_size"), [(1, 500), (7, 500), (64, 493), (128, 300), (493, 493)])
def test_the_graph_lists_the_largest(k: int, vocab_size: int, tied: bool) -> None:
    rows = np.random.default_rng(0).normal(0, 4, (5, 500)).astype(np.float32)
    rows[:, vocab_size:] = 99  # logits of no token
    rows[1] = np.round(rows[1]) if tied else rows[1]
    rows[2, : vocab_size - 3] = -np.inf
    for row, top in zip(rows[:, :vocab_size], reduced_by_openvino(rows, k, vocab_size), strict=True):
        assert len(top.token_ids) == k
        assert (np.diff(top.token_ids) > 0).all()
        assert top.bound == top.logits.min()
        check_top(row, top)


def check_top(row: Logits, top: TopLogits | None) -> None:
    """Check that these are the largest logits, and that they decide as the whole row does."""
    assert top
    np.testing.assert_array_equal(row[top.token_ids], top.logits)
    assert (np.delete(row, top.token_ids) <= top.bound).all()
    assert top.logsumexp == pytest.approx(float(np.logaddexp.reduce(row.astype(np.float64))), abs=1e-5)
    for options in ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0}):
        sampler = LogitsSampler(GenerationConfig(**options), [])  # type: ignore[arg-type]
        made, whole = (sampler.distribution(each, []) for each in (listed(row, top), LogitsRow.of(row)))
        np.testing.assert_array_equal(made.probs, whole.probs)
        assert sampler.best(listed(row, top), []) == sampler.best(LogitsRow.of(row), [])


def test_the_graph_loses_nothing_of_a_flat_tail() -> None:
    """In single precision, each of these is lost when added to 1; together they are 0.9 % of it."""
    rows = np.full((2, 150_000), np.log(6e-8), dtype=np.float32)
    rows[:, 7] = 0
    for top in reduced_by_openvino(rows, 4, 149_999):
        assert top.logsumexp == pytest.approx(np.log1p(149_998 * 6e-8), abs=5e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_graph_tells_of_a_broken_row(bad: float) -> None:
    rows = np.zeros((3, 500), dtype=np.float32)
    rows[1, 400] = bad
    finite = [bool(np.isfinite(top.logsumexp)) for top in reduced_by_openvino(rows, 8, 450)]
    assert finite == [True, False, True]
    rows[1] = -np.inf
    assert not np.isfinite(reduced_by_openvino(rows, 8, 450)[1].logsumexp)


# In the engine

OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"temperature": 0.8, "top_p": 0.8, "seed": 4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_k": 5, "seed": 6, "sampling": "rejection"},
    {"temperature": 1.0, "min_p": 0.1, "seed": 7, "sampling": "token-rejection", "logit_bias": {5: 2.0}},
]


def make_engine(bundle: Bundle, top_logits: int | str) -> outrider.Engine:
    # Drafts made ahead have other bits where calls of other sizes round otherwise, which rejection sampling may show.
    return load_toy(bundle, top_logits=top_logits, overlap=False)


@pytest.mark.parametrize(
    "proposed", [pytest.param(None, id="all"), pytest.param(range(0, 40, 3), id="cut", marks=pytest.mark.slow)]
)
def test_the_text_is_the_same(tmp_path: Path, proposed: range | None) -> None:
    bundle = save_toy_bundle(tmp_path / "toy", proposed=proposed)
    whole, *reduced = (make_engine(bundle, num_top) for num_top in (0, 1, 8, 4096))
    drafters: tuple[tuple[str | None, int], ...] = ((None, 0), ("draft", 4), ("suffix", 3))
    for drafter, count in drafters:
        for options in OPTIONS:
            asked = {"drafter": drafter, "num_assistant_tokens": count, "ignore_eos": True, **options}
            first, *others = (engine.generate("hello", max_new_tokens=24, **asked) for engine in (whole, *reduced))
            for other in others:
                assert first.token_ids == other.token_ids, (drafter, options)
                assert first.stats.num_accepted_tokens == other.stats.num_accepted_tokens


@pytest.mark.parametrize("options", [{}, {"assistant_confidence_threshold": 0.2}, {"temperature": 0.7, "top_k": 3}])
def test_whole_rows_stay_where_they_are(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Main and draft model decode without any whole row, unless logprobs are requested."""
    engine = make_engine(openvino_bundle, 8)
    monkeypatch.setattr(PagedStep, "row", lambda self, i: LogitsRow(unread, self._top(i)))
    asked = {"num_assistant_tokens": 4, "max_new_tokens": 30, "drafter": "draft", "ignore_eos": True, **options}
    assert engine.generate("hello", **asked).stats.num_accepted_tokens > 0
    with pytest.raises(AssertionError, match="the whole row was asked for"):
        engine.generate("hello", logprobs=1, **asked)


def test_on_cpu_nothing_is_picked_out_unless_asked(openvino_bundle: Bundle) -> None:
    for top_logits, expected in (("auto", 0), (0, 0), (5, 5), (4096, openvino_bundle.manifest.main.vocab_size)):
        main = make_engine(openvino_bundle, top_logits).main
        assert isinstance(main, OpenVINOPaged)
        assert main.num_top == expected
        assert ("top_logits" in main.fingerprint) == bool(expected)


def test_models_in_onnx_cannot_be_asked(tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "onnx", formats=("onnx", "onnx"))
    assert make_engine(bundle, 0)
    with pytest.raises(OptionError, match="top_logits=5 is for models in OpenVINO's format"):
        make_engine(bundle, 5)


@pytest.mark.parametrize("value", [-1, 4097, 1.0, True, "8"])
def test_bad_values_are_named_with_their_rule(value: Any) -> None:
    with pytest.raises(OptionError, match=f"top_logits={value!r} is not 'auto', or an integer from 0 to 4096"):
        outrider.Config().replace(top_logits=value)


@pytest.mark.parametrize("change", ["token_ids", "logits", "logsumexp"])
def test_a_device_that_lists_others_is_refused(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    main = openvino_bundle.manifest.main
    found = PagedStep._top

    def wrong(step: PagedStep, i: int) -> TopLogits | None:
        if (top := found(step, i)) is None:
            return None
        changes: dict[str, Any] = {
            "token_ids": top.token_ids[::-1],
            "logits": top.logits + 1,
            "logsumexp": top.logsumexp + 0.01,
        }
        return dataclasses.replace(top, **{change: changes[change]})

    monkeypatch.setattr(PagedStep, "_top", wrong)
    made = OpenVINOPaged(openvino_bundle.model_path(main), vocab_size=main.vocab_size, top_logits=8)
    with pytest.raises(DeviceError, match="CPU picks out other logits than the largest"):
        made.allocate(64)
    made._chooses_top = True  # then it does without
    made.allocate(64)
    assert made.num_top == 0
    slot = open_slot(made, 2)
    assert made.submit([Chunk(slot, [1, 2], 2)]).wait().row(0).top is None


def test_a_real_model_has_the_same_rows_and_says_the_same(smollm2: Path) -> None:
    known = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    setting: dict[str, Any] = {
        "precision": "bf16" if "BF16" in known else "f32",
        "properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128},
    }
    whole, reduced = (outrider.load(smollm2, cache_size=0.1, top_logits=k, **setting) for k in (0, 64))
    token_ids = np.random.default_rng(0).integers(20, 49_000, 40).tolist()
    steps = [
        engine.main.submit([Chunk(open_slot(engine.main, 40), token_ids, num_rows=40)]).wait()
        for engine in (whole, reduced)
    ]
    for i in range(40):
        np.testing.assert_array_equal(steps[1].row(i).full(), steps[0].row(i).full())
        check_top(steps[1].row(i).full(), steps[1].row(i).top)
    for options in OPTIONS[:1] + OPTIONS[2:5]:
        asked: dict[str, Any] = {"max_new_tokens": 24, "seed": 1, "num_assistant_tokens": 3, **options}
        first, second = (engine.generate("Write a poem about the sea.", **asked) for engine in (whole, reduced))
        assert first.token_ids == second.token_ids
