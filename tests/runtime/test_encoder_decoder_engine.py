"""The engine with a toy encoder-decoder pair: caches, drafts, and errors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from calls import rows_of_call
from encoder_decoder_toy import START, VOCAB, save_encoder_decoder
from outrider.config import Config
from outrider.engine.engine import Engine
from outrider.errors import OptionError, OutriderError, RequestError
from outrider.models.backends.encoder_decoder import EncoderDecoder
from outrider.models.tuning.measure.readings import compare_readings
from outrider.testing import ToyTokenizer
from outrider.types import Chunk, EncoderSource, Exactness, Prompt, Rounding, RowRule
from toys import load_toy

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "ignore_eos": True}
TEXTS = ("the quick brown fox", "jumps over 13 lazy dogs", "abc abc abc abc")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    bundle = save_encoder_decoder(tmp_path_factory.mktemp("toy") / "pair")
    with load_toy(bundle, cache_size=0.01, keep_records=False) as made:
        yield made


@pytest.fixture
def backend(engine: Engine) -> EncoderDecoder:
    engine.settle()
    found = engine.main
    assert isinstance(found, EncoderDecoder)
    return found


def logits_of(backend: EncoderDecoder, token_ids: list[int], sizes: list[int], source: EncoderSource | None) -> Any:
    """All rows, read in chunks of these sizes."""
    slot = backend.open(len(token_ids), Prompt((), source=source))
    assert slot is not None
    rows = []
    for size in sizes:
        chunk = token_ids[slot.length : slot.length + size]
        rows += [*rows_of_call(backend, Chunk(slot, chunk, len(chunk)))]
    slot.close()
    return np.array(rows)


def test_rows_are_those_of_numpy(backend: EncoderDecoder) -> None:
    """A second look at the tokens, with all keys at once: no token sees padding, or what follows it."""
    token_ids = np.random.default_rng(0).integers(VOCAB, size=150).tolist()
    source = EncoderSource.of_text([1, 2, 3, 4])
    whole = logits_of(backend, token_ids, [150], source)
    for sizes in ([1] * 150, [63, 1, 1, 85], [7] * 22, [64, 64, 22]):
        assert np.array_equal(logits_of(backend, token_ids, sizes, source), whole)
    assert not np.array_equal(logits_of(backend, token_ids, [150], EncoderSource.of_text([1, 2, 3, 5])), whole)
    changed = [*token_ids[:100], (token_ids[100] + 1) % VOCAB, *token_ids[101:]]
    other = logits_of(backend, changed, [150], source)
    assert np.array_equal(other[:100], whole[:100])
    assert not np.array_equal(other[100:], whole[100:])


def test_every_way_to_read_gives_the_same_bits(backend: EncoderDecoder) -> None:
    assert backend.capabilities.bit_exact_batching
    assert not any(compare_readings(backend, 100).values())


def test_trimmed_tokens_leave_no_trace(backend: EncoderDecoder) -> None:
    source = EncoderSource.of_text([5, 6])
    expected = logits_of(backend, [1, 2, 3, 4], [4], source)
    slot = backend.open(70, Prompt((), source=source))
    assert slot is not None
    backend.submit([Chunk(slot, [1, 2, *range(30), *range(30)], 1)]).wait()  # across the border at 64 keys
    slot.trim(2)
    assert np.array_equal(rows_of_call(backend, Chunk(slot, [3, 4], 2)), expected[2:])
    slot.close()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [{"ignore_eos": True}, {}, SAMPLED], ids=str)
def test_drafted_is_plain(engine: Engine, options: dict[str, Any]) -> None:
    accepted = dict.fromkeys(engine.drafters, 0)
    for text in TEXTS:
        plain = engine.generate(text, max_new_tokens=72, drafter=None, **options)
        for name in engine.drafters:
            for count in (1, 6):
                given: dict[str, Any] = {"drafter": name, "num_assistant_tokens": count}
                found = engine.generate(text, max_new_tokens=72, **given, **options)
                assert found.token_ids == plain.token_ids
                accepted[name] += found.stats.num_accepted_tokens
        assert engine.generate(text, max_new_tokens=72, **options).token_ids == plain.token_ids
    if options:
        assert all(accepted.values())


def test_streams_of_several_texts_at_a_time(engine: Engine) -> None:
    plain = [engine.generate(text, max_new_tokens=70, drafter=None, ignore_eos=True).token_ids for text in TEXTS]
    streams = [engine.stream(text, max_new_tokens=70, ignore_eos=True) for text in TEXTS]
    found = [[chunk.result.token_ids for chunk in stream if chunk.result] for stream in streams]
    assert found == [[each] for each in plain]


def test_the_main_models_encoder_is_the_drafts(engine: Engine) -> None:
    main, draft = (engine.loaded[role].backend for role in ("main", "draft"))
    assert isinstance(main, EncoderDecoder)
    assert isinstance(draft, EncoderDecoder)
    before = main.encoder.num_runs
    engine.generate(TEXTS[0], drafter="draft", max_new_tokens=4)
    assert (main.encoder.num_runs, draft.encoder.num_runs) == (before + 1, 0)


def test_an_encoder_of_its_own(tmp_path: Any) -> None:
    bundle = save_encoder_decoder(tmp_path / "pair", same_encoder=False)
    with load_toy(bundle, cache_size=0.01) as engine:
        plain, drafted = (
            engine.generate(TEXTS[0], drafter=name, max_new_tokens=30, ignore_eos=True) for name in (None, "draft")
        )
        assert drafted.token_ids == plain.token_ids
        draft = engine.loaded["draft"].backend
        assert isinstance(draft, EncoderDecoder)
        assert draft.encoder.num_runs == 1


def test_a_source_takes_room_until_its_request_ends(engine: Engine, backend: EncoderDecoder) -> None:
    assert backend.cache.num_used_tokens == 0
    slot = backend.open(10, Prompt((), source=EncoderSource.of_text([1] * 20)))
    assert slot is not None
    assert backend.cache.num_used_tokens == 30 + backend.capabilities.rows.num_spare
    slot.close()
    slot.close()
    assert backend.cache.num_used_tokens == 0
    assert backend.open(backend.cache.num_tokens + 1) is None
    with pytest.raises(RequestError, match="65 tokens; the encoder reads 64"):
        backend.open(4, Prompt((), source=EncoderSource.of_text([1] * 65)))
    with pytest.raises(RequestError, match="for the adapter 'legal', and EncoderDecoder has none here"):
        backend.open(4, Prompt((), source=EncoderSource.of_text([1]), adapter="legal"))
    with pytest.raises(RequestError, match="exceed the model's context"):
        engine.generate(TEXTS[0], max_new_tokens=512)


def test_the_decoder_begins_with_its_own_token(engine: Engine) -> None:
    request = engine.prepare(TEXTS[0])
    assert request.sequence.token_ids == [START]
    assert request.stats.num_prompt_tokens == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"main_device": "NPU", "properties": {"NPUW_DEVICES": "CPU"}}, "runs on a CPU or GPU only"),
    ({"cache_precision": "u8"}, "cache is in f32"),
], ids=["npu", "u8"])  # fmt: skip
def test_what_such_models_lack(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Engine(engine.bundle, Config().replace(drafter=None, **options), tokenizer=ToyTokenizer())


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ([{"role": "user", "content": "hello"}], {}, "no chat"),
    (np.zeros(16_000, dtype=np.float32), {}, "reads text"),
    (Prompt([0]), {}, "has a source"),
    (Prompt([0], source=EncoderSource.of_audio(np.zeros((80, 3000), dtype=np.float32))), {}, "reads text"),
    ("", {}, "empty"),
    ("hello", {"tools": [TOOL]}, "chat template"),
], ids=["messages", "audio", "no source", "features", "empty", "tools"])  # fmt: skip
def test_what_is_no_text_is_refused(engine: Engine, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message) as error:
        engine.generate(prompt, **options)
    assert "\n" not in str(error.value)


def test_there_is_no_chat_no_sound_and_no_tree(engine: Engine, backend: EncoderDecoder) -> None:
    with pytest.raises(OptionError, match="template"):
        engine.chat()
    with pytest.raises(OptionError, match="reads text, not audio"):
        engine.transcribe(np.zeros(16_000, dtype=np.float32))
    slot = backend.open(8)
    assert slot is not None
    assert slot.fork(2, 2) == 0
    with pytest.raises(RequestError, match="evaluates chains only"):
        backend.submit([Chunk(slot, [1, 2, 3], 3, parents=[-1, -1])])
    slot.close()


def test_padding_is_not_kept_and_calls_end_where_the_number_of_keys_changes(backend: EncoderDecoder) -> None:
    measured = backend.exactness
    backend.use(Exactness(rule=RowRule(sequence=Rounding(2))))
    try:
        slot = backend.open(150)
        assert slot is not None
        backend.submit([Chunk(slot, [1], 1)]).wait()
        assert slot.length == 1
        sizes = []
        for part in backend._parts(Chunk(slot, [*range(30)] * 4, 1)):
            sizes.append(len(part.token_ids))
            slot.length += len(part.token_ids)
        assert sizes == [62, 58]  # after the first token, 63 positions leave room for one row of padding
        slot.close()
    finally:
        backend.use(measured)
