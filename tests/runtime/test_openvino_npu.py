"""The NPU's backend, emulated on the CPU through NPUW: windows, rollback, limits, and pairs on two devices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import outrider
from calls import rows_of_call
from outrider.bundle import Bundle
from outrider.models.backends.npu_sizes import find_sizes
from outrider.models.backends.openvino_npu import OpenVINONpu
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.cost.slots import open_slot
from outrider.models.tuning.measure.exactness import measure_exactness
from outrider.models.tuning.measure.readings import compare_readings
from outrider.testing import ToyTokenizer
from outrider.types import Chunk, CompiledModel, Prompt, RowRule, Span
from outrider_bench.modes.make import make_modes
from toys import load_toy

EMULATED = {"NPUW_DEVICES": "CPU"}
SMALL: dict[str, Any] = {"npu_max_prompt_tokens": 300, "npu_max_new_tokens": 100, "properties": EMULATED}
WINDOW = 8
# Pieces of 128 tokens; windows begin at 0, 1, 9, 17, …
TOKEN_IDS: list[int] = np.random.default_rng(0).integers(0, 39, 400).tolist()


@pytest.fixture(scope="module")
def backend(openvino_bundle: Bundle) -> OpenVINONpu:
    return load(openvino_bundle)


def load(bundle: Bundle, **options: Any) -> OpenVINONpu:
    defaults = {"context_length": 2048, "max_rows": WINDOW, "max_prompt_tokens": 300, "max_new_tokens": 100}
    path = bundle.model_path(bundle.manifest.main)
    return OpenVINONpu(path, vocab_size=40, precision="f32", **(defaults | {"properties": EMULATED} | options))


def rows_of(backend: CompiledModel, sizes: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
    """The last rows of a text read in chunks of these sizes, as many of each chunk as are `wanted`."""
    slot = open_slot(backend, sum(sizes))
    rows = []
    for size, num_rows in zip(sizes, wanted, strict=True):
        rows += [*rows_of_call(backend, Chunk(slot, TOKEN_IDS[slot.length : slot.length + size], num_rows))]
    slot.close()
    return np.array(rows)


def test_it_calculates_what_the_other_backend_does(backend: OpenVINONpu, openvino_bundle: Bundle) -> None:
    main = openvino_bundle.manifest.main
    paged = OpenVINOPaged(openvino_bundle.model_path(main), vocab_size=40, precision="f32")
    paged.allocate(512)
    # All values between NPUW's parts are in f16, including keys and values.
    np.testing.assert_allclose(rows_of(backend, [390], [300]), rows_of(paged, [390], [300]), atol=0.02)
    assert (backend.num_layers, backend.logits_width) == (paged.num_layers, paged.logits_width)
    assert backend.bytes_per_token == paged.bytes_per_token / 2
    assert (backend.precision, backend.cache_precision) == ("f32", "f16")
    assert backend.device == "NPU (emulated on CPU)"


def test_a_row_has_the_same_bits_however_it_was_come_by(backend: OpenVINONpu) -> None:
    found = measure_exactness(backend)
    assert found.holds
    assert found.rule == RowRule()  # calls have one size
    assert set(compare_readings(backend, 300).values()) == {0.0}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("num_prompt", [1, 2, 9, 10, 127, 128, 129, 200, 256, 257, 300])
def test_rejected_tokens_leave_no_trace(backend: OpenVINONpu, num_prompt: int) -> None:
    """Three times: a draft that is much too long, then a token. Across windows' ends, and directly after the prompt."""
    count = num_prompt + 30
    whole = rows_of(backend, [num_prompt, *[1] * 30], [1] * 31)
    slot = open_slot(backend, count + 20)
    backend.submit([Chunk(slot, TOKEN_IDS[:num_prompt], 1)]).wait()
    for i in range(num_prompt, count):
        for wrong in ([7] * 17, [3, 4], []):
            rows = rows_of_call(backend, Chunk(slot, [TOKEN_IDS[i], *wrong], len(wrong) + 1))
            np.testing.assert_array_equal(rows[0], whole[1 + i - num_prompt])
            slot.trim(i)
        backend.submit([Chunk(slot, [TOKEN_IDS[i]], 1)]).wait()
    slot.close()


def test_a_prompt_that_was_cut_short_is_read_again(backend: OpenVINONpu) -> None:
    """At its first call, NPUW's decoding model takes over the prompt as it was read, before any trim."""
    for count in (7, 200):
        expected = rows_of(backend, [count], [1])
        for kept in (0, 1, 5, 140, 199):
            if kept < count:
                slot = open_slot(backend, 300)
                backend.submit([Chunk(slot, [*TOKEN_IDS[:kept], *[9] * (290 - kept)], 0)]).wait()
                slot.trim(kept)
                np.testing.assert_array_equal(rows_of_call(backend, Chunk(slot, TOKEN_IDS[kept:count], 1)), expected)
                slot.close()


@pytest.mark.parametrize(("count", "num_kept"), [(300, 256), (257, 128), (130, 128), (129, 0), (40, 0)])
@pytest.mark.parametrize("was_cancelled", [False, True])
def test_a_prompt_that_begins_as_the_last_one_is_read_from_there(
    backend: OpenVINONpu, count: int, num_kept: int, was_cancelled: bool
) -> None:
    rows_of(backend, [50], [1])
    fresh = rows_of(backend, [count, 1, 1], [1, 1, 1])
    first = backend.open(400)
    assert first is not None
    assert first.length == 0
    backend.submit([Chunk(first, TOKEN_IDS[:270], 0)]).wait()
    if not was_cancelled:
        for token_id in (7, 8, 9):
            backend.submit([Chunk(first, [token_id], 1)]).wait()
    first.close()
    slot = backend.open(400, Prompt(TOKEN_IDS[:count]))
    assert slot is not None
    # As many whole pieces as the prefill model would read. 270 is not where a window begins: it was read up to 265.
    assert slot.length == num_kept
    for i, token_ids in enumerate((TOKEN_IDS[num_kept:count], *([t] for t in TOKEN_IDS[count : count + 2]))):
        np.testing.assert_array_equal(rows_of_call(backend, Chunk(slot, token_ids, 1))[0], fresh[i])
    slot.close()


def test_another_prompt_takes_nothing_of_the_last_one(backend: OpenVINONpu) -> None:
    prompts = [[9] * 300, [*TOKEN_IDS[:127], 5, *TOKEN_IDS[128:300]], TOKEN_IDS[:200], TOKEN_IDS[:300]]
    for token_ids, scope in zip(prompts, (b"", b"", b"", b"image"), strict=True):
        rows_of(backend, [300], [1])
        if len(token_ids) == 200:
            rows_of(backend, [5], [1])  # writes over it
        slot = backend.open(300, Prompt(token_ids, scope))
        assert slot is not None
        assert slot.length == 0
        slot.close()


def test_embeds_and_trees_are_refused(backend: OpenVINONpu) -> None:
    span = Span(3, np.zeros((2, 4), np.float32), b"cat")
    with pytest.raises(outrider.RequestError, match="embeds for 2 tokens .* OpenVINONpu reads token ids only"):
        backend.open(300, Prompt(TOKEN_IDS[:9], embeds=(span,)))
    slot = open_slot(backend, 300)
    with pytest.raises(outrider.RequestError, match="OpenVINONpu evaluates chains only"):
        backend.submit([Chunk(slot, [1, 2, 3], 3, parents=[-1, -1])])
    assert slot.length == 0
    slot.close()


def test_there_is_one_slot_with_room_to_its_end(backend: OpenVINONpu) -> None:
    assert backend.max_tokens == 400
    slot = open_slot(backend, 400)
    assert backend.open(1) is None
    backend.submit([Chunk(slot, TOKEN_IDS[:399], 1)]).wait()
    backend.submit([Chunk(slot, TOKEN_IDS[399:], 1)]).wait()  # the last window is written whole
    slot.close()
    slot.close()
    assert backend.open(401) is None
    again = open_slot(backend, 1)
    again.close()


def test_sizes_are_what_was_asked_for_and_npuw_can_have() -> None:
    sizes = find_sizes(max_rows=4, context_length=2048, prompt=None, answer=None)
    assert (sizes.prompt, sizes.answer, sizes.window, sizes.piece) == (1024, 512, 8, 256)
    assert sizes.max_tokens == 1536
    assert (sizes.prefill % 256, sizes.total % 64) == (0, 0)
    for prompt, answer in ((1, 1), (64, 1), (1000, 7), (129, 300)):
        for rows in (2, 9, 33):
            sizes = find_sizes(rows, 4096, prompt, answer)
            assert sizes.max_tokens == prompt + answer
            assert sizes.prefill >= 2 * sizes.piece
            begin = sizes.window_begin(prompt + answer - 1)
            assert sizes.window_end(begin) <= sizes.past
    with pytest.raises(outrider.OptionError, match="npu_max_prompt_tokens=300 and npu_max_new_tokens=100 exceed"):
        find_sizes(8, 399, 300, 100)
    with pytest.raises(outrider.OptionError, match="npu_max_new_tokens=2,048 exceed"):
        find_sizes(8, 2048, None, 2048)


PLACES = [("NPU", "CPU"), ("CPU", "NPU"), ("NPU", "NPU")]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def engine(request: pytest.FixtureRequest, openvino_bundle: Bundle) -> outrider.Engine:
    main_device, draft_device = request.param
    return load_toy(openvino_bundle, main_device=main_device, draft_device=draft_device, **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("prompt", ["a", "0123456789" * 30])
def test_a_pair_on_two_devices_says_what_its_main_model_says(
    engine: outrider.Engine, prompt: str, sampling: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 60, "ignore_eos": True, **sampling}
    plain = engine.generate(prompt, drafter=None, **options)
    for drafter in ("draft", "suffix"):
        for count in (1, 8, 20):  # the last is more than a window holds
            drafted = engine.generate(prompt, drafter=drafter, num_assistant_tokens=count, **options)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.num_draft_tokens > 0
    assert engine.generate(prompt, **options).token_ids == plain.token_ids
    before, engine.overlaps = engine.overlaps, True
    try:
        assert engine.generate(prompt, num_assistant_tokens=4, **options).token_ids == plain.token_ids
    finally:
        engine.overlaps = before


MAIN_ON_NPU = pytest.mark.parametrize(
    "engine", [PLACES[0], pytest.param(PLACES[2], marks=pytest.mark.slow)], ids="-".join, indirect=True
)
DRAFT_ON_NPU = pytest.mark.parametrize("engine", PLACES[1:2], ids="-".join, indirect=True)


@pytest.mark.slow
@DRAFT_ON_NPU
def test_a_draft_model_with_one_place_holds_nobody_up(engine: outrider.Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 90, "ignore_eos": True}
    drafting: dict[str, Any] = {"drafter": "draft", "num_assistant_tokens": 3}
    plain = [engine.generate(prompt, drafter=None, **options) for prompt in ("hello", "world")]
    first = engine.stream("hello", **options, **drafting)
    text = next(first).text
    beside = engine.generate("world", **options, **drafting)  # while the first request has the only slot
    assert beside.token_ids == plain[1].token_ids
    assert beside.stats.num_draft_tokens == 0
    chunks = list(first)
    assert text + "".join(chunk.text for chunk in chunks) == plain[0].text
    assert chunks[-1].stats.num_draft_tokens > 0
    # The certificate's runs draft, so they take turns on the device.
    assert [mode.num_parallel for mode in make_modes(["plain", "draft:3"], engine)] == [1, 1]


@MAIN_ON_NPU
def test_requests_beyond_what_was_compiled_are_refused_before_they_run(engine: outrider.Engine) -> None:
    with pytest.raises(
        outrider.RequestError, match=r"compiled for prompts of up to 300 .* 301\. Load with npu_max_prompt_tokens=301"
    ):
        engine.generate("a" * 301)
    with pytest.raises(outrider.RequestError, match=r"400 tokens .* needs 500\. .* npu_max_new_tokens=200"):
        engine.generate("a" * 300, max_new_tokens=200)
    assert len(engine.generate("a" * 300, ignore_eos=True).token_ids) == 100  # what fits, as nothing was asked


def test_without_an_npu_it_says_how_to_try_one(openvino_bundle: Bundle) -> None:
    config = outrider.Config().replace(main_device="NPU", cache_size=0.005)
    with pytest.raises(outrider.OptionError, match=r"no device 'NPU' here. Found: .*CPU.*'NPUW_DEVICES': 'CPU'"):
        outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())
    with pytest.raises(outrider.OptionError, match="cache_precision='u8' is not for an NPU. Use auto, f16, f32"):
        load(openvino_bundle, cache_precision="u8")


def test_settings_that_cannot_be_compiled_are_refused_before(openvino_bundle: Bundle) -> None:
    config = outrider.Config().replace(main_device="NPU", properties=EMULATED, npu_max_prompt_tokens=2048)
    with pytest.raises(outrider.OptionError, match=r"npu_max_prompt_tokens=2,048 and .* context of 2,048 tokens"):
        outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())
    with pytest.raises(outrider.OptionError, match="npu_max_new_tokens=0 is not an integer of at least 1"):
        outrider.Config().replace(npu_max_new_tokens=0)


def test_properties_do_not_contradict_the_options(openvino_bundle: Bundle) -> None:
    with pytest.raises(outrider.OptionError, match="'NPUW_LLM_MAX_PROMPT_LEN', which Outrider sets to 384. Leave it"):
        load(openvino_bundle, properties={**EMULATED, "NPUW_LLM_MAX_PROMPT_LEN": 1024})


def test_properties_of_an_npu_are_not_for_other_devices(openvino_bundle: Bundle) -> None:
    config = outrider.Config().replace(cache_size=0.005, draft_device="NPU", properties={**EMULATED, "NO_SUCH": 1})
    with pytest.raises(outrider.DeviceError, match="CPU cannot compile main: .*NO_SUCH"):
        outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())
