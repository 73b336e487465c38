"""Images in the messages of /v1/chat/completions, and in the items of /v1/responses."""

import base64
import io
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.inputs.vision import Vision
from outrider.server import Settings
from serving import serving, wait_until
from tiny_vision import add_toy_encoder, asking, picture

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")


def messages(url: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


def url_of(seed: int) -> str:
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


UNSEEN = [
    ("seeing", "https://example.org/cat.png", "images are never fetched"),
    ("seeing", "/etc/passwd", "images are never fetched"),
    ("seeing", "data:image/png;base64,aGVsbG8=", "The image cannot be read by Pillow"),
    ("tiny", url_of(2), "the main model reads text only"),
]


def items(url: str, **more: Any) -> Any:
    parts = [{"type": "input_image", "image_url": url, **more}, {"type": "input_text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


def test_responses_see_the_images_of_their_conversation(tiny: Path, tmp_path: Path) -> None:
    folder = add_toy_encoder(tiny, tmp_path / "seeing").folder
    limit = len(url_of(2)) * 3
    with serving({"tiny": tiny, "seeing": folder}, Settings(max_stored=limit)) as live:
        client = live.client()
        asked: dict[str, Any] = {"model": "seeing", "max_output_tokens": 12}
        first = client.responses.create(input=items(url_of(2), detail="high"), **asked)
        *_, last = client.responses.create(input=items(url_of(3)), previous_response_id=first.id, stream=True, **asked)
        talk = [
            *asking(picture(2), text="What is this?"),
            {"role": "assistant", "content": first.output_text},
            *asking(picture(3), text="What is this?"),
        ]
        engine = live.engine("seeing")
        expected = engine.generate(talk, max_new_tokens=12)
        assert last.response.output_text == expected.text
        assert last.response.usage.input_tokens == expected.stats.num_prompt_tokens
        # Images count as they are stored: with the second conversation of two images the first answer goes.
        client.responses.create(input="Hi", previous_response_id=last.response.id, **asked)
        with pytest.raises(openai.BadRequestError, match="no longer stored"):
            client.responses.create(input="Hi", previous_response_id=first.id, **asked)
        for model, given, said in UNSEEN:
            with pytest.raises(openai.BadRequestError, match=said):
                client.responses.create(model=model, input=items(given))


def test_an_image_is_read_from_a_data_url(tiny: Path, tmp_path: Path) -> None:
    url = url_of(2)
    folder = add_toy_encoder(tiny, tmp_path / "seeing").folder
    with serving({"tiny": tiny, "seeing": folder}) as live:
        client = live.client()
        answer = client.chat.completions.create(model="seeing", messages=messages(url), max_tokens=12)
        engine = live.engine("seeing")
        expected = engine.generate(asking(picture(2), text="What is this?"), max_new_tokens=12)
        assert answer.choices[0].message.content == expected.text
        assert answer.usage.prompt_tokens == expected.stats.num_prompt_tokens
        for model, given, said in UNSEEN:
            with pytest.raises(openai.BadRequestError, match=said):
                client.chat.completions.create(model=model, messages=messages(given), max_tokens=4)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> "Reading":
    """What is read of images."""
    reading = Reading()
    encode = Vision.encode

    def watched(self: Vision, image: Any) -> Any:
        reading.count += 1
        reading.begun.set()
        assert reading.go_on.wait(300)
        return encode(self, image)

    monkeypatch.setattr(Vision, "encode", watched)
    return reading


class Reading:
    """begun: that an image was begun. go_on: has to be set before one is read."""

    def __init__(self) -> None:
        self.count, self.begun, self.go_on = 0, threading.Event(), threading.Event()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_image_is_read_once_for_all_answers(tiny: Path, tmp_path: Path, read: Reading, stream: bool) -> None:
    read.go_on.set()
    folder = add_toy_encoder(tiny, tmp_path / "seeing").folder
    asked: dict[str, Any] = {"model": "seeing", "messages": messages(url_of(2)), "max_tokens": 8, "temperature": 1}
    with serving({"seeing": folder}) as live:
        client = live.client()
        texts = [""] * 5
        answer = client.chat.completions.create(**asked, n=5, seed=7, stream=stream)
        for choice in (choice for chunk in answer for choice in chunk.choices) if stream else answer.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        assert read.count == 1
        for i, text in enumerate(texts):
            assert client.chat.completions.create(**asked, seed=7 + i).choices[0].message.content == text


def test_a_client_that_leaves_has_no_more_images_read(tiny: Path, tmp_path: Path, read: Reading) -> None:
    """Nor do those wait who have none."""
    folder = add_toy_encoder(tiny, tmp_path / "seeing").folder
    many = [part for seed in range(4) for part in messages(url_of(seed))[0]["content"]]
    with serving({"seeing": folder}) as live:
        client = live.client()
        client.completions.create(model="seeing", prompt="Hi", max_tokens=1)
        with pytest.raises(openai.APITimeoutError):
            live.client(timeout=0.3).chat.completions.create(
                model="seeing", messages=[{"role": "user", "content": many}], max_tokens=4
            )
        assert read.begun.is_set()
        for _ in range(40):  # each would take one of the event loop's threads
            with pytest.raises(openai.APITimeoutError):
                live.client(timeout=0.02).chat.completions.create(model="seeing", messages=messages(url_of(9)))
        assert client.completions.create(model="seeing", prompt="Hi", max_tokens=4).choices
        wait_until(lambda: live.is_idle)
        read.go_on.set()
        assert client.chat.completions.create(model="seeing", messages=messages(url_of(5)), max_tokens=4).choices
        assert read.count == 2
