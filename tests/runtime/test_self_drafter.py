"""Drafters that are made of the main model's own layers."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import rows_of_call

pytest.importorskip("gguf", reason="writes the file that the bundle is made of")

from pathlib import Path

import outrider
from layered import NUM_LAYERS, VOCAB_SIZE, make_layered, with_layers
from outrider.bundle import Bundle
from outrider.bundle.fit import check_fit
from outrider.errors import BundleError, OutriderError
from outrider.models.backends.openvino_layers import OpenVINOLayers
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.segments import cut
from outrider.models.backends.taps import hidden_states_of
from outrider.models.tuning.model_spec import cuts_for
from outrider.types import Chunk, Exactness, Rounding, RowRule

KEPT = (0, 1, 3, 4)
RULES = (RowRule(), RowRule(call=Rounding(8, 8)), RowRule(separate=True, dummy_rows=2))
CUTS = ((0,), (3,), (NUM_LAYERS,), (2, 3), tuple(range(NUM_LAYERS + 1)))


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_layered(tmp_path_factory.mktemp("layered"))


@pytest.fixture(scope="module")
def engine(layered: Bundle) -> outrider.Engine:
    return load(layered)


def load(bundle: Bundle, layers: tuple[int, ...] = KEPT, **options: Any) -> outrider.Engine:
    config = outrider.Config().replace(**({"cache_size": 0.01, "keep_records": False} | options))
    return outrider.Engine(with_layers(bundle, self=layers), config)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(20, 400, length).tolist()
    return token_ids


def ask(engine: outrider.Engine, prompt: list[int], drafter: str | None, **options: Any) -> Any:
    options = {"max_new_tokens": 40, "ignore_eos": True, "num_assistant_tokens": 3} | options
    return engine.generate(prompt, drafter=drafter, **options)


def compiled(bundle: Bundle, precision: str, cuts: tuple[int, ...], features: tuple[str, ...] = ()) -> OpenVINOPaged:
    def build(core: ov.Core, path: Path) -> ov.Model:
        return read_decoder(core, path, features)

    path = bundle.model_path(bundle.manifest.main)
    options: dict[str, Any] = {"precision": precision, "cuts": cuts, "features": features, "build": build}
    return OpenVINOPaged(path, vocab_size=VOCAB_SIZE, **options)


def read(backend: OpenVINOPaged, rule: RowRule, features: tuple[str, ...] = ()) -> list[Any]:
    """Rows of logits, and hidden states, of two texts that are read together, in pieces and token by token."""
    backend.use(Exactness(rule=rule))
    backend.allocate(1024)
    texts, rows = [prompt_of(1, 50), prompt_of(2, 50)], []
    slots = [backend.open(80) for _ in texts]
    for begin, end in itertools.pairwise((0, 30, 31, 32, 36, 50)):
        count = min(2, end - begin)
        chunks = [
            Chunk(slot, text[begin:end], count, features, generated=end - begin < 8)
            for slot, text in zip(slots, texts, strict=True)
        ]
        step = backend.submit(chunks).wait()
        rows += [row.full().copy() for chunk in chunks for row in step.rows(chunk)]
        rows += [step.features(chunk).copy() for chunk in chunks if features]
    return rows


@given(st.sets(st.integers(0, 9)))
def test_a_model_is_cut_where_kept_layers_and_others_meet(kept: set[int]) -> None:
    cuts = sorted(cuts_for(kept, 10))
    runs = [range(*ends) for ends in itertools.pairwise((0, *cuts, 10))]
    assert all(kept.issuperset(run) or kept.isdisjoint(run) for run in runs)
    for before, after in itertools.pairwise(runs[1:-1]):  # no cut too many
        assert kept.issuperset(before) != kept.issuperset(after)
    assert kept.issuperset(runs[0])  # the embedding and the logits are there
    assert kept.issuperset(runs[-1])


@pytest.mark.parametrize("precision", [pytest.param("f32", marks=pytest.mark.slow), "auto"])
def test_no_bit_changes_where_a_model_is_cut(layered: Bundle, precision: str) -> None:
    model = compiled(layered, precision, ())
    whole = {rule: read(model, rule) for rule in RULES}
    for cuts in CUTS:
        backend = compiled(layered, precision, cuts)
        assert backend.segments
        assert backend.segments.cuts == cuts
        assert backend.num_layers == NUM_LAYERS
        for rule, rows in whole.items():
            np.testing.assert_array_equal(read(backend, rule), rows)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [KEPT, (1, 4)], ids=str)
def test_what_is_left_is_the_model_without_those_layers(layered: Bundle, kept: tuple[int, ...], tmp_path: Path) -> None:
    """Compared with an export of a checkpoint that never had them. The cache has another part for each layer."""
    main = compiled(layered, "f32", tuple(sorted(cuts_for(kept, NUM_LAYERS))))
    main.allocate(1024)
    part = OpenVINOLayers(main, kept)
    part.allocate(0)
    assert part.num_layers == len(kept)
    assert part.bytes_per_token == 0
    small = compiled(make_layered(tmp_path, kept), "f32", ())
    whole, found = read(compiled(layered, "f32", ()), RULES[0]), []
    text = [prompt_of(1, 50), prompt_of(2, 50)]
    slots = [main.open(80) for _ in text]
    for begin, end in itertools.pairwise((0, 30, 31, 32, 36, 50)):
        count = min(2, end - begin)
        found += [*rows_of_call(part, *(Chunk(s, t[begin:end], count) for s, t in zip(slots, text, strict=True)))]
    np.testing.assert_allclose(found, read(small, RULES[0]), atol=1e-4)
    assert np.abs(np.array(found) - whole).max() > 0.1


@pytest.mark.slow
def test_layers_that_the_model_is_not_cut_for_are_refused(layered: Bundle) -> None:
    main = compiled(layered, "f32", (2, 3))
    for kept in ((0, 1, 2, 3), (0, 1), (2,), (3, 4)):
        with pytest.raises(ValueError, match="not cut for calls of layers"):
            OpenVINOLayers(main, kept)
    with pytest.raises(ValueError, match=r"not cut for calls of layers \[0, 1, 4\]"):
        OpenVINOLayers(compiled(layered, "f32", (1, 4)), (0, 1, 4))
    with pytest.raises(ValueError, match="not cut into segments"):
        OpenVINOLayers(compiled(layered, "f32", ()), KEPT)


def test_a_model_of_another_form_is_refused(openvino_bundle: Bundle) -> None:
    model = read_decoder(ov.Core(), openvino_bundle.model_path(openvino_bundle.manifest.main))
    with pytest.raises(BundleError, match="its graph is none of layers that follow each other. Load it with"):
        cut(model, [1])


def test_a_model_whose_layers_read_past_each_other_is_refused(layered: Bundle) -> None:
    model = read_decoder(ov.Core(), layered.model_path(layered.manifest.main))
    found = hidden_states_of(model, NUM_LAYERS)
    stream, early = found["hidden_states.4"], found["hidden_states.1"].get_node().input_value(1)
    readers = stream.get_target_inputs()
    scaled = ov.opset13.multiply(stream, ov.opset13.reduce_max(early, np.array([0, 1, 2]), True))
    for reader in readers:
        if reader.get_node().get_type_name() == "Power":
            reader.replace_source_output(scaled.output(0))
    with pytest.raises(BundleError, match="layers that follow each other"):
        cut(model, [2, 3])


@pytest.mark.parametrize("layers", [KEPT, pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_greedy_and_sampled_text_is_that_of_plain_decoding(layered: Bundle, layers: tuple[int, ...]) -> None:
    engine = load(layered, layers)
    for seed, options in itertools.product(range(2), ({}, {"temperature": 0.8, "seed": 1, "top_p": 0.9})):
        plain = ask(engine, prompt_of(seed), None, **options)
        for count in (1, 3, 8):
            drafted = ask(engine, prompt_of(seed), "self", num_assistant_tokens=count, **options)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.num_drafts >= 4
        assert ask(engine, prompt_of(seed), "auto", num_assistant_tokens="auto", **options).token_ids == plain.token_ids


def test_drafts_are_accepted_and_rejected_at_each_place(engine: outrider.Engine) -> None:
    accepted = np.zeros(3)
    for seed in range(4):
        stats = ask(engine, prompt_of(seed), "self").stats
        accepted += stats.num_accepted_tokens_per_position
        assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert accepted[0] > accepted[1] > accepted[2] > 0


def test_several_requests_at_once(engine: outrider.Engine) -> None:
    """With a drafter, without, and with another; more than fit in one call's rows alike."""
    names = ["self", None, "self", "suffix", "self", "auto"]
    plain = [ask(engine, prompt_of(i, 10 + 7 * i), None).token_ids for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(ask, engine, prompt_of(i, 10 + 7 * i), name) for i, name in enumerate(names)]
    assert [job.result().token_ids for job in jobs] == plain


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_prefixes_are_right_after_drafts(layered: Bundle, separate: bool) -> None:
    """A text that goes on finds what was published beside drafts, and a cache without drafts gives the same."""
    engine, fresh = load(layered), load(layered, enable_prefix_caching=False)
    for each in (engine, fresh):
        main: Any = each.main
        rule = next(rule for rule in main.separate_rules if rule.dummy_rows == 2) if separate else RowRule()
        main.use(Exactness(rule=rule, differences={"none": 0.0}))
    text = prompt_of(9, 33)
    for turn in range(4):
        answer = ask(engine, text, "self", max_new_tokens=21)
        assert answer.token_ids == ask(fresh, text, None, max_new_tokens=21).token_ids
        if turn:
            assert answer.stats.num_cached_tokens >= 33
        text = [*text, *answer.token_ids, *prompt_of(turn, 5)]
    again = ask(engine, text[:60], "self")
    assert again.stats.num_cached_tokens > 30
    assert again.token_ids == ask(fresh, text[:60], None).token_ids


def test_a_draft_leaves_the_slot_as_it_was(engine: outrider.Engine) -> None:
    """Cancelled in the middle, an answer publishes what it has; the next one begins there, and is right."""
    prompt, plain = prompt_of(11), ask(engine, prompt_of(11), None, max_new_tokens=60).token_ids
    cancel = threading.Event()
    stream = engine.stream(
        prompt, max_new_tokens=60, ignore_eos=True, drafter="self", num_assistant_tokens=3, cancel=cancel
    )
    for i, chunk in enumerate(stream):
        if i == 2:
            cancel.set()
        if chunk.result:
            assert chunk.result.finish_reason == "cancelled"
            assert chunk.result.token_ids == plain[: len(chunk.result.token_ids)]
    assert ask(engine, prompt, "self", max_new_tokens=60).token_ids == plain


@pytest.mark.parametrize(
    "layers",
    [(), (0, 5), (1, 0), (0, 0, 1), tuple(range(NUM_LAYERS))],
    ids=["none", "unknown", "order", "twice", "all"],
)
def test_a_manifest_with_other_layers_is_damaged(layered: Bundle, layers: tuple[int, ...]) -> None:
    with pytest.raises(BundleError, match=r"outrider.json is damaged: drafter 'self' .*layers"):
        check_fit(with_layers(layered, self=layers).manifest)


def test_an_npu_runs_the_model_as_a_whole(layered: Bundle) -> None:
    with pytest.raises(OutriderError, match="made of some of the main model's layers, which NPUW compiles as a whole"):
        load(layered, main_device="NPU", main_properties={"NPUW_DEVICES": "CPU"})
