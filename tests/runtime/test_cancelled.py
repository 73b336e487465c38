"""Cancelled answers, and calls that fail, leave no trace: later answers are those of plain decoding."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from calls import rows_of_call
from outrider.bundle import Bundle
from outrider.decoding import prefix_check
from outrider.errors import DeviceError
from outrider.models.backends.infer_calls import InferCalls
from outrider.models.cost.slots import open_slot
from outrider.models.kv import BlockPool
from outrider.models.kv.chunk_files import folders_in
from outrider.models.tuning.measure.readings import read
from outrider.types import Chunk, Draft, Prompt
from outrider_bench.verify.cancelled import cancel_and_compare, known_answers
from serving import wait_until
from toys import load_toy, random_ids

NUM_CANCELS = int(os.environ.get("OUTRIDER_CANCELS", "24"))
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
# Two begin alike, within a block and beyond one; one is read in many pieces.
PROMPTS = [random_ids(1, 90), random_ids(1, 70) + random_ids(2, 9), random_ids(3, 400), random_ids(4, 20)]


class Branching:
    """Drafts trees, with two branches of two tokens."""

    def propose(self, requests: Any) -> list[Draft]:
        tree = Draft([1, 2, 3, 4], parents=[-1, 0, -1, 2])
        return [tree if request.limit >= 4 and request.trees else Draft([]) for request in requests]


def load_with_trees(bundle: Bundle, **options: Any) -> outrider.Engine:
    engine = load_toy(bundle, max_num_batched_tokens=64, **options)
    engine.add_drafter("branching", Branching())
    return engine


@pytest.mark.every_format
def test_answers_after_cancelled_ones_are_plain_decoding_s(toy_bundle: Bundle, tmp_path: Path) -> None:
    """At random moments, in all ways, with a cache so small that prefixes are evicted, and come from files.

    OUTRIDER_CANCELS is how many are cancelled.
    """
    with load_with_trees(toy_bundle, cache_size=0.002, prefix_store=str(tmp_path)) as engine:
        known = known_answers(engine, PROMPTS, **OPTIONS)
        drafters = ["draft", "suffix", "branching", "auto", None]
        assert cancel_and_compare(engine, known, drafters, NUM_CANCELS, 1, **OPTIONS) == []


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls end as failed while this is not empty. They write to the cache nevertheless."""
    wanted: list[bool] = []
    wait = InferCalls.wait

    def fail(self: InferCalls) -> None:
        wait(self)
        if wanted:
            raise DeviceError("CPU failed: of ours")

    monkeypatch.setattr(InferCalls, "wait", fail)
    return wanted


@pytest.mark.parametrize(("options", "left"), [
    ({"cache_precision": "f32"}, 70),
    ({"cache_precision": "u8"}, 70),
    ({"cache_precision": "u8", "properties": {"KEY_CACHE_QUANT_MODE": "BY_CHANNEL"}}, 64),
])  # fmt: skip
def test_a_failed_call_leaves_its_slot_as_it_was_or_shorter(
    openvino_bundle: Bundle, failing: list[bool], options: dict[str, Any], left: int
) -> None:
    """A block that is rounded by channel is rounded again with what is written to it."""
    with load_toy(openvino_bundle, **options) as engine:
        slot, ids = open_slot(engine.main, 300), random_ids(11, 300)
        engine.main.submit([Chunk(slot, ids[:70], num_rows=0)]).wait()
        failing.append(True)
        with pytest.raises(DeviceError):
            engine.main.submit([Chunk(slot, ids[70:], num_rows=1)]).wait()
        failing.clear()
        assert slot.length == left
        (row,) = rows_of_call(engine.main, Chunk(slot, ids[left:], num_rows=1))
        slot.close()
        assert left < 70 or np.array_equal(row, read(engine.main, ids, [len(ids)], num_rows=1)[0])


@pytest.mark.parametrize("cache_precision", ["f32", "u8"])
@pytest.mark.parametrize("drafter", ["branching", "draft", None])
def test_a_failed_call_is_dropped_and_never_published(
    openvino_bundle: Bundle, failing: list[bool], drafter: str | None, cache_precision: str
) -> None:
    """Blocks that the failed call's slot shares with published prefixes stay as they are."""
    with load_with_trees(openvino_bundle, cache_precision=cache_precision) as engine:
        plain = engine.generate(PROMPTS[0], drafter=None, **OPTIONS).token_ids
        pool: Any = engine.loaded["main"].backend.prefixes
        keys, blocks = PROMPTS[0][:64], pool.read(PROMPTS[0][:64], b"", 0)
        for after in (0, 1, 3):
            stream = engine.stream(PROMPTS[0], drafter=drafter, **OPTIONS)
            for _ in range(after):
                next(stream)
            failing.append(True)
            with pytest.raises(DeviceError, match="of ours"):
                list(stream)
            failing.clear()
            engine.settle()
            np.testing.assert_array_equal(pool.read(keys, b"", 0), blocks)
            again = engine.generate(PROMPTS[0], drafter=None, **OPTIONS)
            assert again.token_ids == plain
            assert again.stats.num_cached_tokens >= 64


def test_a_model_whose_call_failed_is_used_no_more(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph may be half prepared, and would compute other numbers."""
    with load_toy(openvino_bundle) as engine:
        assert not engine.has_failed
        with monkeypatch.context() as patched:

            class Failing:
                def start_async(self) -> None:
                    """As if it began."""

                def wait(self) -> None:
                    raise RuntimeError("of ours")

            main: Any = engine.main
            patched.setattr(main._calls, "_request", Failing())
            with pytest.raises(DeviceError, match="CPU failed: of ours"):
                engine.generate(PROMPTS[3], drafter=None, **OPTIONS)
        assert engine.has_failed
        with pytest.raises(DeviceError, match="failed in an earlier call .of ours.*Load the model again"):
            engine.generate(PROMPTS[3], drafter=None, **OPTIONS)


def test_published_blocks_are_read_only() -> None:
    pool = BlockPool(8, 4)
    table = pool.open(16)
    assert table
    table.publish(range(8))
    table.check_writable(8)
    with pytest.raises(AssertionError, match="token 7 would be written to a shared block"):
        table.check_writable(7)
    shared, own = table.blocks[0], table.blocks[2]
    pool.check_unpublished(own)
    with pytest.raises(AssertionError, match="is published"):
        pool.check_unpublished(shared)
    table.close([*range(10)])
    with pytest.raises(AssertionError, match="is published"):
        pool.check_unpublished(own)  # the last block, part full
    pool.clear()
    assert pool.num_free == 8
    for number in range(8):
        pool.check_unpublished(number)


@pytest.mark.every_format
def test_a_wrong_prefix_is_found_and_dropped(
    toy_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One in some hundred is read again while the engine is idle. Its files are dropped, too; a draft model's stay."""
    monkeypatch.setattr(prefix_check, "EVERY_HITS", 2)

    def num_stored() -> int:
        return sum(each.num_tokens for each in folders_in(tmp_path) if each.about["model"] == "main")

    with load_toy(toy_bundle, prefix_store=str(tmp_path)) as engine:
        check = engine._queue._scheduler.prefix_check
        texts = [engine.generate(PROMPTS[0], **OPTIONS).token_ids for _ in range(4)]
        engine.settle()
        assert (check.num_checked, check.num_wrong) == (1, 0)  # a later one takes an earlier one's place
        wait_until(num_stored)
        cache = engine.loaded["main"].backend.prefixes
        # As if something had written to the cache: the same tokens with the keys and values of others.
        engine.generate(PROMPTS[2], **OPTIONS)
        content = cache.read(PROMPTS[2][:64], b"", 0)
        engine.main.clear_prefixes()
        cache.restore(PROMPTS[0][:64], b"", [(0, content)], 80)
        for _ in range(2):
            engine.generate(PROMPTS[0], **OPTIONS)
        engine.settle()
        assert check.num_wrong == 1
        assert "A cached prefix of 64 tokens differs" in caplog.text
        wait_until(lambda: not num_stored())
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == texts[0]


def test_prefixes_of_conversations_are_checked(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is checked ends before, in and after an earlier answer."""
    monkeypatch.setattr(prefix_check, "EVERY_HITS", 1)
    with load_toy(openvino_bundle) as engine:
        check = engine._queue._scheduler.prefix_check
        ids = random_ids(5, 40)
        ids += engine.generate(ids, max_new_tokens=60, ignore_eos=True).token_ids + random_ids(6, 60)
        for most in (30, 64, 96, 256):
            monkeypatch.setattr(prefix_check, "MOST_TOKENS", most)
            for _ in range(2):
                engine.generate(Prompt(ids, answers=((40, 100), (120, 120), (150, 160))), **OPTIONS)
            engine.settle()
        assert check.num_checked >= 4
        assert not check.num_wrong
        assert "could not be checked" not in caplog.text
