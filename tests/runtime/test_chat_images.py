"""Images in conversations: what is kept of them, read again, found in the prefix cache, and refused."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.cli.chat.session import Session
from outrider.errors import RequestError
from outrider.inputs.vision import Tiles, VisionEncoder, read_image, to_data_url
from outrider.types import Prompt
from tiny_vision import PARTS_TEMPLATE, TOY_PLACE, asking, picture

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(seeing: Path) -> Iterator[outrider.Engine]:
    with outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False, drafter="suffix") as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(seeing: Path) -> Iterator[outrider.Engine]:
    """Without drafts and without a prefix cache."""
    options: dict[str, Any] = {"enable_prefix_caching": False, "drafter": None, "keep_records": False}
    with outrider.load(seeing, precision="f32", cache_size=0.05, **options) as engine:
        yield engine


def prompt_of(chat: outrider.Chat, turn: int = -1) -> Prompt:
    """The prompt that a turn has answered."""
    turns = chat.turns
    at = turn % len(turns)
    return chat._layout.prompt(turns[:at], turns[at].messages)


def keys_of(engine: outrider.Engine, *images: Any) -> list[bytes]:
    """The keys of images' tiles."""
    assert engine.vision
    return [key for image in images for _, key in engine.vision.encode(image).tiles]


def talked(engine: outrider.Engine) -> outrider.Chat:
    """Two images, the second one in a later turn."""
    chat = engine.chat("Be brief.", **OPTIONS)
    chat.send(asking(picture(1)))
    chat.send("And its tail? Is it a tail?")
    chat.send(asking(picture(2, 20, 50), text="Is it the same?"))
    chat.send("Why?")
    return chat


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_later_turns_see_the_images_of_earlier_ones(
    engine: outrider.Engine, plain: outrider.Engine, sampled: dict[str, Any]
) -> None:
    chat = engine.chat("Be brief.", **OPTIONS, **sampled)
    images: list[Any] = []
    for message in (
        asking(picture(1)),
        "And its tail? Is it a tail?",
        asking(picture(2, 20, 50), picture(1), text="Is it the same?"),
        "Why?",
    ):
        before = len(chat.token_ids)
        images += [part["image"] for each in message if isinstance(each, dict) for part in each["content"][:-1]]
        result = chat.send(message)
        prompt = prompt_of(chat)
        assert [span.key for span in prompt.embeds] == keys_of(engine, *images)
        assert plain.generate(prompt, **OPTIONS, **sampled).token_ids == result.token_ids
        # Also where the turn brings a further image: what stands before it is not read again.
        assert result.stats.num_cached_tokens >= before - 1
        assert result.stats.num_prompt_tokens == len(prompt.token_ids)
    assert [span.begin for span in prompt_of(chat, 1).embeds] == [span.begin for span in prompt.embeds][: 3 * 3 + 1]


def test_streams_and_event_loops_answer_alike(engine: outrider.Engine) -> None:
    async def both(chat: outrider.Chat) -> None:
        await chat.asend(asking(picture(3)))
        async for _ in chat.astream("Why?"):
            pass

    sent, streamed, awaited = (engine.chat(**OPTIONS) for _ in range(3))
    sent.send(asking(picture(3)))
    sent.send("Why?")
    for message in (asking(picture(3)), "Why?"):
        for _ in streamed.stream(message):
            pass
    asyncio.run(both(awaited))
    assert sent.turns == streamed.turns == awaited.turns


def test_closing_ends_tasks_whose_images_wait(seeing: Path) -> None:
    """With the engine's own error: nobody has cancelled these tasks."""

    async def ask(engine: outrider.Engine) -> list[BaseException | outrider.Result]:
        assert engine.vision
        thread, goes_on = engine.vision.encoder.thread, Event()
        thread.submit(goes_on.wait, 60)
        waiting = asyncio.create_task(engine.agenerate(asking(picture(1)), **OPTIONS))
        while not thread._work_queue.qsize():
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        goes_on.set()
        return [*await asyncio.gather(waiting, return_exceptions=True)]

    with outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False) as engine:
        (error,) = asyncio.run(ask(engine))
    assert isinstance(error, RequestError)
    assert "closed" in str(error)


def test_an_engine_that_closes_before_images_are_sent_to_their_thread(
    seeing: Path,
) -> None:
    with outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False) as engine:
        assert engine.vision
        engine.vision.encoder.thread.shutdown()  # as closing does, after the request's own check
        with pytest.raises(RequestError, match="This engine is closed"):
            asyncio.run(engine.agenerate(asking(picture(1)), **OPTIONS))


def test_a_conversation_with_images_is_saved_whole(engine: outrider.Engine, seeing: Path, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    Image.fromarray(picture(5)).save(path)
    chat = engine.chat(messages=asking(Image.fromarray(picture(4)), text="Look."), **OPTIONS)
    chat.send(asking(str(path), text="What is this?"))
    path.unlink()
    chat.save(tmp_path / "chat.json")
    session = Session(engine)
    session.load(str(tmp_path / "chat.json"))
    session.rewind()
    assert session.unsent == "What is this?"
    following = chat.send("Why?")
    with outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False) as another:
        loaded = another.load_chat(tmp_path / "chat.json", **OPTIONS)
        assert loaded.messages == chat.messages[:-2]
        assert loaded.turns == chat.turns[:-1]
        assert loaded.send("Why?").token_ids == following.token_ids
    assert prompt_of(loaded).embeds == prompt_of(chat).embeds


def test_rewound_forked_and_retried(engine: outrider.Engine) -> None:
    chat = talked(engine)
    turns, fork = chat.turns, chat.fork()
    assert chat.retry().token_ids == list(turns[-1].answer_token_ids)
    chat.rewind(2)
    assert chat.send(turns[2].messages).token_ids == list(turns[2].answer_token_ids)
    assert fork.send("So?").stats.num_cached_tokens >= len(turns[-1].token_ids) - 1
    assert fork.messages[:-2] == [{"role": "system", "content": "Be brief."}, *sum((t.all_messages for t in turns), ())]
    # The messages are those of `generate`.
    result = engine.generate(chat.messages[:-1], **OPTIONS)
    assert result.stats.num_prompt_tokens > len(prompt_of(chat).embeds) * 4


def test_an_image_is_encoded_once_while_it_is_in_the_conversation(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tiles] = []
    encode = VisionEncoder.encode

    def count(self: VisionEncoder, tiles: Tiles) -> Any:
        seen.append(tiles)
        return encode(self, tiles)

    monkeypatch.setattr(VisionEncoder, "encode", count)
    chat = engine.chat(**OPTIONS)
    for i in range(10):  # more than the encoder keeps
        chat.send(asking(picture(20 + i, 12, 12), text="?"), max_new_tokens=1)
    assert len(seen) == 10
    chat.fork().send("Why?")
    assert len(seen) == 10
    chat.rewind(10)
    chat.send("Hi")
    chat.send(asking(picture(20, 12, 12), text="?"))
    assert len(seen) == 11  # forgotten in between


def test_images_that_an_answer_names_are_none(engine: outrider.Engine) -> None:
    """The token that stands for an image, generated."""
    assert engine.vision
    place = engine.vision.entry.image_token_id
    chat = engine.chat(**OPTIONS)
    assert place in chat.send(asking(picture(1)), logit_bias={place: 100.0}).token_ids
    chat.send(asking(picture(2)))
    assert [span.key for span in prompt_of(chat).embeds] == keys_of(engine, picture(1), picture(2))


def test_the_layout_of_smolvlm_keeps_answers(seeing: Path, plain: outrider.Engine) -> None:
    """Its template writes contents in parts, and a space before an answer that the model writes itself."""
    with outrider.load(seeing, precision="f32", cache_size=0.05, keep_records=False, drafter="suffix") as engine:
        tokenizer: Any = engine.tokenizer
        tokenizer.set_chat_template(PARTS_TEMPLATE.replace("<image>", TOY_PLACE))
        chat = engine.chat(**OPTIONS)
        for message in ("Hi there", asking(picture(1)), "Why?", asking(picture(2))):
            before = chat.token_ids
            result = chat.send(message)
            assert chat.turns[-1].token_ids[: len(before)] == tuple(before)
            assert plain.generate(prompt_of(chat), **OPTIONS).token_ids == result.token_ids
        assert "Hi there" in tokenizer.decode(chat.token_ids)


def test_what_cannot_be_seen_leaves_the_conversation_as_it_was(
    engine: outrider.Engine, tiny: Path, tmp_path: Path
) -> None:
    chat = engine.chat(**OPTIONS)
    chat.send("Hi")
    for message, said in (
        (asking("nowhere.png"), "^The image nowhere.png cannot be read"),
        (asking(picture(1), text=f"{TOY_PLACE}?"), "^The prompt has 2 places for images .* and 1 images"),
        (asking(*(picture(i) for i in range(200))), "context|holds"),
        ([{"role": "user", "content": [{"type": "video"}]}], "has a part of type 'video'"),
    ):
        with pytest.raises((outrider.RequestError, outrider.OptionError), match=said) as caught:
            chat.send(message)
        assert "\n" not in str(caught.value)
        assert len(chat.turns) == 1
    chat.send("Why?")
    with outrider.load(tiny, cache_size=0.02, keep_records=False) as text_only:
        for sent in (text_only.chat(), text_only.chat(messages=asking(picture(1)))):
            with pytest.raises(outrider.RequestError, match="^The prompt has an image, and the main model reads text"):
                sent.send(asking(picture(1)) if not sent.messages else "Why?")


@pytest.mark.parametrize("at", ["turn", "opening"])
def test_a_file_that_names_an_image_of_this_machine_is_refused(
    engine: outrider.Engine, tmp_path: Path, at: str
) -> None:
    chat = engine.chat(messages=asking(picture(1)), **OPTIONS)
    chat.send(asking(picture(2)))
    chat.save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert saved["model"]["vision"]
    message = (saved["turns"][0]["messages"] if at == "turn" else saved["opening"])[0]
    message["content"][0]["image"] = str(tmp_path / "secret.png")
    del saved["checksum"]
    (tmp_path / "chat.json").write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(outrider.OptionError, match="is damaged: .* a message whose image is not in the file"):
        engine.load_chat(tmp_path / "chat.json")


def test_a_data_url_has_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    turned = Image.Exif()
    turned[0x0112] = 6  # held sideways
    Image.fromarray(picture(1)).save(path, quality=60, exif=turned)
    for given in (path, str(path), path.read_bytes(), picture(2), Image.open(path), Image.fromarray(picture(3))):
        url = to_data_url(given)
        assert url.startswith("data:image/png;base64," if "Image" in str(type(given)) or isinstance(given, np.ndarray)
                              else "data:image/jpeg;base64,")  # fmt: skip
        assert (np.asarray(read_image(url)) == np.asarray(read_image(given))).all()
        assert to_data_url(url) is url
