"""Images in the messages of /v1/chat/completions, and in the items of /v1/responses."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import openai
import pytest

from outrider.server import Settings
from serving import serving
from tiny_vision import add_toy_encoder, asking, picture

if TYPE_CHECKING:
    from pathlib import Path

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")


def messages(url: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


def url_of(seed: int) -> str:
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


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
        with pytest.raises(openai.BadRequestError, match="not stored any more"):
            client.responses.create(input="Hi", previous_response_id=first.id, **asked)
        for model, given, said in (
            ("seeing", "https://example.org/cat.png", "nothing is fetched"),
            ("seeing", "/etc/passwd", "nothing is fetched"),
            ("seeing", "data:image/png;base64,aGVsbG8=", "The image is none that Pillow can read"),
            ("tiny", url_of(2), "the main model reads text only"),
        ):
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
        for model, given, said in (
            ("seeing", "https://example.org/cat.png", "nothing is fetched"),
            ("seeing", "/etc/passwd", "nothing is fetched"),
            ("seeing", "data:image/png;base64,aGVsbG8=", "The image is none that Pillow can read"),
            ("tiny", url, "the main model reads text only"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                client.chat.completions.create(model=model, messages=messages(given), max_tokens=4)
