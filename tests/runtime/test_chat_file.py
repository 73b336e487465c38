"""Conversations that are saved, and go on in another engine."""

import json
import os
import pathlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.engine.chat.file import read_chat
from outrider.errors import OptionError
from outrider.system.nesting import MOST_LEVELS, TooDeep, check_levels
from outrider.testing import save_toy_bundle
from watching import chat_engine


@pytest.fixture(scope="module")
def engine(openvino_bundle: Bundle) -> Iterator[outrider.Engine]:
    with chat_engine(openvino_bundle) as engine:
        yield engine


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def talked(engine: outrider.Engine) -> outrider.Chat:
    chat = engine.chat("be kind", tools=[{"name": "look"}], max_new_tokens=24)
    for words in ("hello there", "the same"):
        # The end token in the middle is no text: tokenized again, the answers would be other ids.
        chat.send(words, ignore_eos=True, temperature=3.0, seed=2, logit_bias={39: 5.0})
    return chat


def test_a_saved_chat_goes_on_in_a_new_engine(engine: outrider.Engine, openvino_bundle: Bundle, tmp_path: Path) -> None:
    chat = talked(engine)
    chat.save(tmp_path / "chat.json")
    turns = chat.turns
    following = chat.send("why")
    with chat_engine(openvino_bundle) as another:
        loaded = another.load_chat(tmp_path / "chat.json", max_new_tokens=24)
        assert loaded.turns == turns
        assert loaded.messages == chat.messages[:-2]
        assert loaded.send("why").token_ids == following.token_ids
        assert loaded.turns == chat.turns
        assert loaded.retry().token_ids == following.token_ids
    chat.save(tmp_path / "chat.json")  # in place of the file
    assert engine.load_chat(tmp_path / "chat.json").turns == chat.turns
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_a_file_has_each_token_once(engine: outrider.Engine, tmp_path: Path) -> None:
    chat = engine.chat(max_new_tokens=20)
    for i in range(8):
        chat.send(f"number {i}")
    chat.save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert sum(len(turn["token_ids"]) for turn in saved["turns"]) == len(chat.token_ids)
    assert engine.load_chat(tmp_path / "chat.json").turns == chat.turns


def test_a_file_that_cannot_be_written_leaves_the_old_one(engine: outrider.Engine, tmp_path: Path) -> None:
    talked(engine).save(tmp_path / "chat.json")
    before = (tmp_path / "chat.json").read_bytes()
    broken = engine.chat(messages=[{"role": "system", "content": "x", "extra": object()}])
    with pytest.raises(outrider.OptionError, match="chat.json cannot be written: .* Name another file"):
        broken.save(tmp_path / "chat.json")
    with pytest.raises(outrider.OptionError, match="cannot be written"):
        broken.save(tmp_path / "missing" / "chat.json")
    assert (tmp_path / "chat.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_a_write_that_is_cut_off_leaves_the_old_file(
    engine: outrider.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = talked(engine)
    chat.save(tmp_path / "chat.json")
    before = (tmp_path / "chat.json").read_bytes()
    chat.send("more")

    def write_half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(pathlib.Path, "write_bytes", write_half)
    with pytest.raises(outrider.OptionError, match="the disk is full"):
        chat.save(tmp_path / "chat.json")
    assert (tmp_path / "chat.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved.update(fields)


def in_turn(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["turns"][1].update(fields)


@pytest.mark.parametrize(("change", "says"), [
    (changed(kind="letter"), "is not a chat. Name a file that Chat.save wrote"),
    (changed(version=2), "has version 2 of the format.*Upgrade"),
    (changed(turns="none"), r"cannot be read.*\$\.turns"),
    (in_turn(num_kept=1000), "turn 2 does not fit the one before"),
    (in_turn(num_kept=-1), "turn 2 does not fit the one before"),
    (in_turn(answers=[]), "turn 2 does not fit the one before"),
    (in_turn(answers=[[3, 100_000]]), "turn 2 has answers at"),
    (in_turn(answers=[[7, 3]]), "turn 2 has answers at"),
    (in_turn(token_ids=[1, 40]), "turn 2 has the token id 40, of 40"),
    (in_turn(token_ids=[-1]), "turn 2 has the token id -1"),
    (in_turn(messages=[{"role": "user"}]), "turn 2 has a message without"),
    (changed(tools=[{"parameters": nested(200)}]), "cannot be read: it is nested too deeply"),
])  # fmt: skip
def test_damaged_files_are_refused(
    engine: outrider.Engine, tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    talked(engine).save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    del saved["checksum"]  # as in files of earlier versions
    (tmp_path / "chat.json").write_text(json.dumps(saved), encoding="utf-8")
    assert len(engine.load_chat(tmp_path / "chat.json").turns) == 2
    change(saved)
    (tmp_path / "chat.json").write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(outrider.OptionError, match=says):
        engine.load_chat(tmp_path / "chat.json")


def test_a_flipped_bit_is_found_or_changes_nothing(
    engine: outrider.Engine, openvino_bundle: Bundle, tmp_path: Path
) -> None:
    talked(engine).save(tmp_path / "chat.json")
    whole, sound = (tmp_path / "chat.json").read_bytes(), read_chat(tmp_path / "chat.json", openvino_bundle)
    num_found = 0
    bits = [*range(0, 8 * len(whole), 29), *range(8 * len(whole) - 8 * 90, 8 * len(whole), 3)]  # the end: the checksum
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "chat.json").write_bytes(flipped)
        try:
            assert read_chat(tmp_path / "chat.json", openvino_bundle) == sound, bit
        except OptionError:
            num_found += 1
    assert num_found > 0.95 * len(bits)


def test_a_file_has_room_for_every_message_that_was_answered(engine: outrider.Engine, tmp_path: Path) -> None:
    chat = engine.chat(max_new_tokens=3)
    deepest = nested(MOST_LEVELS - 3)
    chat.send(message := {"role": "user", "content": "hello", "extra": deepest})
    check_levels(([message], ()))  # as a tokenizer does
    with pytest.raises(TooDeep):
        check_levels(([{"extra": [deepest]}], ()))
    chat.save(tmp_path / "chat.json")
    assert engine.load_chat(tmp_path / "chat.json").turns == chat.turns


def test_files_that_are_no_chats_are_refused(engine: outrider.Engine, tmp_path: Path) -> None:
    with pytest.raises(outrider.OptionError, match="none.json cannot be read: No such file"):
        engine.load_chat(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"kind": "outrider chat", ')
    with pytest.raises(outrider.OptionError, match="cut.json cannot be read"):
        engine.load_chat(tmp_path / "cut.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(outrider.OptionError, match="list.json is not a chat"):
        engine.load_chat(tmp_path / "list.json")


def test_other_models_and_tokenizers_are_refused(engine: outrider.Engine, tmp_path: Path) -> None:
    talked(engine).save(tmp_path / "chat.json")
    with chat_engine(save_toy_bundle(tmp_path / "other", seed=1, draft=False)) as other:
        with pytest.raises(outrider.OptionError, match="saved with another main model.*same_model=False"):
            other.load_chat(tmp_path / "chat.json")
        other.load_chat(tmp_path / "chat.json", same_model=False, max_new_tokens=3).send("go on")
    tokens = [b"%d " % i for i in range(50)]
    with chat_engine(save_toy_bundle(tmp_path / "wide", vocab_size=50, draft=False, tokens=tokens)) as wide:
        for same_model in (True, False):
            with pytest.raises(outrider.OptionError, match="saved with another tokenizer"):
                wide.load_chat(tmp_path / "chat.json", same_model=same_model)


@pytest.mark.needs("POSIX")
def test_a_file_keeps_its_permissions_and_a_new_one_is_its_owners(engine: outrider.Engine, tmp_path: Path) -> None:
    chat, path = talked(engine), tmp_path / "chat.json"
    before = os.umask(0o022)
    try:
        chat.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        chat.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.needs("POSIX")
def test_a_link_is_followed_and_a_pipe_is_refused(engine: outrider.Engine, tmp_path: Path) -> None:
    chat, link, pipe = talked(engine), tmp_path / "link.json", tmp_path / "pipe"
    (tmp_path / "there").mkdir()
    for name in ("new.json", "new.json"):  # it is there the second time
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "there" / name)
        chat.save(link)
        assert link.is_symlink()
        assert engine.load_chat(tmp_path / "there" / name).turns == chat.turns
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to(link)  # to itself
    for path, says in ((pipe, "it is no regular file"), (tmp_path / "there", "it is no regular file"), (link, "")):
        with pytest.raises(OptionError, match=f"cannot be (written|used): {says}"):
            chat.save(path)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "pipe", "there"]
