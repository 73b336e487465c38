"""The engine as an app uses it."""

import dataclasses
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.cli.progress import reading_shown
from outrider.drafters import Suffix
from outrider.inputs.text import Tokenizer
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.testing import ToyTokenizer, save_toy_bundle
from toys import load_toy

pytestmark = pytest.mark.any_format


@pytest.mark.every_format
def test_generate_and_stream_say_the_same(toy_engine: outrider.Engine) -> None:
    result = toy_engine.generate("hello", max_new_tokens=40, ignore_eos=True)
    chunks = list(toy_engine.stream("hello", max_new_tokens=40, ignore_eos=True))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [chunk.result is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].result is not None
    assert chunks[-1].result.token_ids == result.token_ids
    assert len(result.token_ids) == 40
    assert result.finish_reason == "length"


def test_a_stream_says_how_far_its_prompt_is_read(toy_bundle: Bundle) -> None:
    engine, prompt = load_toy(toy_bundle, max_num_batched_tokens=32), "hello " * 20
    chunks = list(engine.stream(prompt, max_new_tokens=9, ignore_eos=True, prompt_progress=True))
    progress, said = ([each for each in chunks if each.is_progress is kind] for kind in (True, False))
    assert progress
    assert progress == chunks[: len(progress)]
    assert "".join(chunk.text for chunk in said) == engine.generate(prompt, max_new_tokens=9, ignore_eos=True).text
    assert said[-1].stats.num_read_tokens == said[-1].stats.num_prompt_tokens > 32
    assert [*reading_shown(chunks)] == said  # no terminal
    engine.close()


@pytest.mark.every_format
@pytest.mark.parametrize("drafter", ["draft", "ngram", "suffix", "auto"])
@pytest.mark.parametrize("prompt", ["hello world", "0123456789" * 20])
def test_every_drafter_gives_the_plain_text(toy_engine: outrider.Engine, drafter: str, prompt: str) -> None:
    plain = toy_engine.generate(prompt, max_new_tokens=80, drafter=None, ignore_eos=True)
    for n in (1, 2, 5, 9):
        drafted = toy_engine.generate(
            prompt, max_new_tokens=80, drafter=drafter, num_assistant_tokens=n, ignore_eos=True
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.num_draft_tokens > 0


@pytest.mark.every_format
def test_the_answer_ends_with_the_end_of_sequence(toy_engine: outrider.Engine) -> None:
    result = toy_engine.generate("hello world", max_new_tokens=500)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == ToyTokenizer.eos_token_id
    assert result.token_ids.count(ToyTokenizer.eos_token_id) == 1
    assert "\0" not in result.text


@pytest.mark.slow
def test_room_comes_back(toy_bundle: Bundle) -> None:
    """Finished, closed, abandoned and collected streams leave the cache as it was."""
    engine = load_toy(toy_bundle, cache_size=0.0003)
    whole = engine.max_tokens - 10
    for _ in range(3):
        engine.generate("hello", max_new_tokens=whole, ignore_eos=True)
        stream = engine.stream("hello", max_new_tokens=whole, ignore_eos=True)
        next(stream)
        stream.close()
        next(engine.stream("hello", max_new_tokens=whole, ignore_eos=True))
        gc.collect()
    assert engine.generate("hello", max_new_tokens=whole, ignore_eos=True).finish_reason == "length"


def test_an_engine_without_the_draft_model_says_so(toy_bundle: Bundle) -> None:
    engine = load_toy(toy_bundle, drafter="ngram", cache_size=0.001)
    assert engine.drafters == ("ngram", "suffix")
    with pytest.raises(outrider.OptionError, match="drafter='draft' was left on disk"):
        engine.generate("abc", drafter="draft")


@pytest.mark.parametrize(("options", "message"), [
    ({"temprature": 1}, "no generation option 'temprature'. Did you mean 'temperature'?"),
    ({"temperature": -1}, r"temperature=-1 is not 0 \(greedy\), or a number from 0.001 to 1000"),
    ({"drafter": "drafft"}, "no drafter 'drafft' here. Did you mean 'draft'?"),
    ({"main_device": "GPU"}, "main_device is an option of loading"),
])  # fmt: skip
def test_bad_options_are_named(toy_engine: outrider.Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(outrider.OptionError, match=message):
        toy_engine.generate("abc", **options)


@pytest.mark.fast_cases(1)
@pytest.mark.every_format
def test_requests_that_cannot_fit_are_refused_with_numbers(toy_bundle: Bundle) -> None:
    small = load_toy(toy_bundle, cache_size=0.0001)
    assert small.max_tokens < 400
    with pytest.raises(
        outrider.RequestError, match=r"cache_size=0.0001 GB holds \d+ tokens; 5 prompt tokens and"
    ) as error:
        small.generate("hello", max_new_tokens=600)
    needed = float(str(error.value).split("at least ")[1].rstrip("."))
    large = load_toy(toy_bundle, cache_size=needed)
    assert large.generate("hello", max_new_tokens=600, ignore_eos=True).finish_reason == "length"
    with pytest.raises(outrider.RequestError):
        load_toy(toy_bundle, cache_size=needed * 0.93).generate("hello", max_new_tokens=600)
    with pytest.raises(outrider.RequestError, match="exceed the model's context of 2,048 tokens"):
        large.generate("a" * 2048)
    with pytest.raises(outrider.RequestError, match="token id 99; the vocabulary ends at 39"):
        large.generate([99])


@pytest.mark.every_format
def test_an_answer_may_fill_the_context(toy_bundle: Bundle) -> None:
    engine = load_toy(toy_bundle, cache_size=0.01)
    plain = engine.generate("a" * 2000, max_new_tokens=48, ignore_eos=True, drafter=None)
    drafted = engine.generate("a" * 2000, max_new_tokens=48, ignore_eos=True, num_assistant_tokens=8)
    assert plain.token_ids == drafted.token_ids
    assert len(plain.token_ids) == 48
    assert len(engine.generate("a" * 2000, ignore_eos=True).token_ids) == 48  # what fits, as nothing was asked


def test_a_model_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "bundle", draft=False)
    path = bundle.folder / "outrider.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["main"]["geometry"]["num_layers"] = 3
    path.write_text(json.dumps(manifest))
    with pytest.raises(outrider.BundleError, match="has 2 layers and 48 logits; outrider.json says 3 and 48"):
        outrider.Engine(outrider.read_bundle(bundle.folder), tokenizer=ToyTokenizer())


@pytest.mark.every_format
def test_padding_is_never_generated(toy_engine: outrider.Engine) -> None:
    """The toy's logits above its vocabulary are the largest by far."""
    for options in ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 2.0, "sampling": "rejection"}):
        result = toy_engine.generate(
            "hello", max_new_tokens=60, ignore_eos=True, seed=1, num_assistant_tokens=3, **options
        )
        assert max(result.token_ids) < 40
        assert result.stats.num_draft_tokens > 0


def test_every_end_ends(toy_bundle: Bundle) -> None:
    """All EOS ids of the bundle, and `stop_token_ids`."""
    import msgspec

    plain = load_toy(toy_bundle, cache_size=0.001)
    token_ids = plain.generate("hello", max_new_tokens=30, ignore_eos=True).token_ids
    end = next(i for i in range(8, 30) if token_ids[i] not in token_ids[:i])
    tokenizer = msgspec.structs.replace(toy_bundle.manifest.tokenizer, eos_token_ids=(39, token_ids[end]))
    manifest = msgspec.structs.replace(toy_bundle.manifest, tokenizer=tokenizer)
    bundle = dataclasses.replace(toy_bundle, manifest=manifest)
    two = load_toy(bundle, cache_size=0.001)
    assert two.generate("hello", max_new_tokens=30).token_ids == token_ids[: end + 1]
    asked = plain.generate("hello", max_new_tokens=30, ignore_eos=True, stop_token_ids=[token_ids[end]])
    assert asked.token_ids == token_ids[: end + 1]
    assert asked.finish_reason == "stop"


@pytest.mark.every_format
def test_times_add_up(toy_engine: outrider.Engine) -> None:
    began = time.perf_counter()
    stats = toy_engine.generate("hello", max_new_tokens=60, ignore_eos=True, num_assistant_tokens=3).stats
    wall = time.perf_counter() - began
    parts = (stats.draft_seconds, stats.check_seconds, stats.host_seconds)
    assert all(part > 0 for part in parts)
    assert stats.time_to_first_token > 0
    assert sum(parts) <= stats.decode_seconds * 1.01 + 1e-3
    assert stats.time_to_first_token + stats.decode_seconds <= wall
    assert stats.tokens_per_second == pytest.approx(59 / stats.decode_seconds)
    assert stats.tokens_per_round == pytest.approx(59 / stats.num_rounds)
    assert str(stats).startswith("60 tokens, ")
    assert f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted" in str(stats)
    ngram = toy_engine.generate("hello", max_new_tokens=20, drafter="ngram").stats
    assert ngram.draft_seconds == 0


def test_options_reach_their_place(openvino_bundle: Bundle) -> None:
    options = {"precision": "f32", "num_threads": 1, "cache_precision": "u8", "cache_size": 0.001}
    engine = outrider.Engine(openvino_bundle, outrider.Config().replace(**options), tokenizer=ToyTokenizer())
    assert engine.setting == {
        "main_device": "CPU f32 in groups of 32, bit-exact, cache u8, 1 thread, OpenVINO",
        "draft_device": "CPU f32 in groups of 32, cache u8, 1 thread, OpenVINO",
    }
    assert isinstance(engine._main, OpenVINOPaged)
    assert engine._main._compiled.get_property("INFERENCE_NUM_THREADS") == 1
    config = outrider.Config().replace(draft_device="XPU")
    with pytest.raises(outrider.OptionError, match="no device 'XPU'"):
        outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())
    short, long = (
        engine.generate("abcabdabcab", drafter="ngram", max_ngram_size=n, max_new_tokens=2, ignore_eos=True).token_ids
        for n in (1, 3)
    )
    assert short == long
    default = engine.generate("hello", ignore_eos=True)
    assert len(default.token_ids) == 512


@pytest.mark.every_format
def test_a_small_draft_cache_limits_requests_up_front(toy_bundle: Bundle) -> None:
    """A request that does not fit in every model's cache is refused at once. It does not wait for ever."""
    engine = load_toy(toy_bundle, cache_size=0.001)
    engine.loaded["draft"].backend.allocate(64)
    assert engine.max_tokens == 64
    with pytest.raises(outrider.RequestError, match="holds 64 tokens"):
        engine.generate("hello", max_new_tokens=200)


@pytest.mark.parametrize(("prompt", "message"), [
    (b"hi", "The prompt is a bytes"),
    ({"role": "user", "content": "x"}, "The prompt is a dict"),
    ([True, False], "Message 0 of the prompt is True"),
    ([{"role": "user", "content": None}], "needs a 'role' and a 'content'"),
    ([], "The prompt is empty"),
    ("\udce9", "lone surrogates"),
])  # fmt: skip
def test_odd_prompts_are_refused(tiny: Path, prompt: Any, message: str) -> None:
    tokenizer = Tokenizer(outrider.read_bundle(tiny).tokenizer_path)
    with pytest.raises(outrider.OutriderError, match=message):
        tokenizer.encode_prompt(prompt)


@pytest.mark.every_format
def test_a_stream_can_be_cancelled(toy_engine: outrider.Engine) -> None:
    cancel = threading.Event()
    chunks = []
    for chunk in toy_engine.stream("hello", max_new_tokens=1000, ignore_eos=True, cancel=cancel):
        chunks.append(chunk)
        cancel.set()
    assert chunks[-1].result is not None
    assert chunks[-1].result.finish_reason == "cancelled"
    assert 0 < len(chunks[-1].result.token_ids) < 1000
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].result.text


def test_the_suffix_drafter_copies_from_references(toy_bundle: Bundle) -> None:
    engine = load_toy(toy_bundle)
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "num_assistant_tokens": 10}
    plain = engine.generate("hello", drafter=None, **options)
    alone = engine.generate("hello", drafter="suffix", **options)
    # The alphabet's last character ends answers, and cannot be written in a document.
    document = "hello" + plain.text
    copied = engine.generate("hello", drafter="suffix", references=["unrelated text", document], **options)
    assert plain.token_ids == alone.token_ids == copied.token_ids
    assert copied.stats.num_accepted_tokens > alone.stats.num_accepted_tokens
    assert copied.stats.num_rounds < 60 / 3


def test_references_are_read_once(toy_bundle: Bundle) -> None:
    read: list[str] = []

    class Counting(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            read.append(text)
            return super().encode(text)

    engine = outrider.Engine(toy_bundle, outrider.Config().replace(references=["one", "two"]), tokenizer=Counting())
    for references in (["one", "two"], ["one", "two"], ["two", "three"]):
        engine.generate([1, 2], drafter="suffix", references=references, max_new_tokens=2)
    engine.generate([1, 2], drafter="suffix", max_new_tokens=2)  # the engine's own
    engine.generate([1, 2], drafter=None, references=["four"], max_new_tokens=2)  # nothing is drafted
    engine.generate([1, 2], num_assistant_tokens=0, references=["four"], max_new_tokens=2)
    engine.add_drafter("own", Suffix())
    unread: list[dict[str, Any]] = [
        {"drafter": "ngram"}, {"drafter": "draft"}, {"drafter": "own"}, {"num_assistant_tokens": 3},
        {"assistant_confidence_threshold": 0.4},
    ]  # fmt: skip
    for options in unread:
        with pytest.raises(outrider.OptionError, match="references are not read with .* Use drafter='suffix', or"):
            engine.generate([1, 2], references=["four"], **options)
    assert read == ["one", "two", "three"]
    engine.generate([1, 2], references=["four"], max_new_tokens=2)
    assert read[-1] == "four"


def test_answers_are_stored_and_copied(toy_bundle: Bundle, tmp_path: Path) -> None:
    config = outrider.Config().replace(cache_size=0.005, answer_store=tmp_path / "answers.bin", drafter="suffix")
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "num_assistant_tokens": 10}
    engine = outrider.Engine(toy_bundle, config, tokenizer=ToyTokenizer())
    first, second = (engine.generate("hello", **options) for _ in range(2))
    assert first.token_ids == second.token_ids == engine.generate("hello", drafter=None, **options).token_ids
    assert second.stats.num_rounds < first.stats.num_rounds / 2
    cancel = threading.Event()
    for _ in engine.stream("other", cancel=cancel, **options):
        cancel.set()
    stopped = engine.generate("world", max_new_tokens=60, ignore_eos=True, stop=first.text[-2:])
    engine.close()
    again = outrider.Engine(toy_bundle, config, tokenizer=ToyTokenizer())
    store = again._registry._store
    assert store is not None
    assert list(store._answers) == [first.token_ids] * 3 + [stopped.token_ids]
    assert again.generate("hello", **options).stats.num_rounds == second.stats.num_rounds
