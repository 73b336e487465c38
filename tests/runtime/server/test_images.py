"""Images in the messages of /v1/chat/completions, and in the items of /v1/responses."""

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.inputs.vision import Vision
from outrider.server import Settings
from serving import Live, serving, wait_until
from tiny_vision import asking, picture

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


@pytest.fixture(scope="module")
def live(tiny: Path, seeing: Path) -> Iterator[Live]:
    """A server of a model that sees images, with room for the answers to three, and of one that does not."""
    with serving({"tiny": tiny, "seeing": seeing}, Settings(max_stored=3 * len(url_of(2)))) as live:
        yield live


def items(url: str, **more: Any) -> Any:
    parts = [{"type": "input_image", "image_url": url, **more}, {"type": "input_text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


def test_responses_see_the_images_of_their_conversation(live: Live) -> None:
    client = live.client()
    asked: dict[str, Any] = {"model": "seeing", "max_output_tokens": 12}
    first = client.responses.create(input=items(url_of(2), detail="high"), **asked)
    *_, last = client.responses.create(input=items(url_of(3)), previous_response_id=first.id, stream=True, **asked)
    talk = [
        *asking(picture(2), text="What is this?"),
        {"role": "assistant", "content": first.output_text},
        *asking(picture(3), text="What is this?"),
    ]
    expected = live.engine("seeing").generate(talk, max_new_tokens=12)
    assert last.response.output_text == expected.text
    assert last.response.usage.input_tokens == expected.stats.num_prompt_tokens
    # Images count as they are stored: with the second conversation of two images the first answer goes.
    client.responses.create(input="Hi", previous_response_id=last.response.id, **asked)
    with pytest.raises(openai.BadRequestError, match="no longer stored"):
        client.responses.create(input="Hi", previous_response_id=first.id, **asked)
    for model, given, said in UNSEEN:
        with pytest.raises(openai.BadRequestError, match=said):
            client.responses.create(model=model, input=items(given))


def test_an_image_is_read_from_a_data_url(live: Live) -> None:
    client = live.client()
    answer = client.chat.completions.create(model="seeing", messages=messages(url_of(2)), max_tokens=12)
    expected = live.engine("seeing").generate(asking(picture(2), text="What is this?"), max_new_tokens=12)
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
def test_an_image_is_read_once_for_all_answers(live: Live, read: Reading, stream: bool) -> None:
    read.go_on.set()
    client, texts = live.client(), [""] * 5
    asked: dict[str, Any] = {"model": "seeing", "messages": messages(url_of(2)), "max_tokens": 8, "temperature": 1}
    answer = client.chat.completions.create(**asked, n=5, seed=7, stream=stream)
    for choice in (choice for chunk in answer for choice in chunk.choices) if stream else answer.choices:
        texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert read.count == 1
    for i, text in enumerate(texts):
        assert client.chat.completions.create(**asked, seed=7 + i).choices[0].message.content == text


@pytest.mark.slow
def test_a_client_that_leaves_has_no_more_images_read(live: Live, read: Reading) -> None:
    """Nor do those wait who have none."""
    client, ask = live.client(), live.client(timeout=0.3).chat.completions.create
    many = [part for seed in range(4) for part in messages(url_of(seed))[0]["content"]]
    client.completions.create(model="seeing", prompt="Hi", max_tokens=1)
    with pytest.raises(openai.APITimeoutError):
        ask(model="seeing", messages=[{"role": "user", "content": many}], max_tokens=4)
    assert read.begun.wait(300)
    for _ in range(40):  # each would take one of the event loop's threads
        with pytest.raises(openai.APITimeoutError):
            live.client(timeout=0.02).chat.completions.create(model="seeing", messages=messages(url_of(9)))
    assert client.completions.create(model="seeing", prompt="Hi", max_tokens=4).choices
    wait_until(lambda: live.is_idle)
    read.go_on.set()
    assert client.chat.completions.create(model="seeing", messages=messages(url_of(5)), max_tokens=4).choices
    assert read.count == 2
