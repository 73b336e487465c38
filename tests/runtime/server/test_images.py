"""Images in the messages of /v1/chat/completions."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import openai
import pytest

from serving import serving
from tiny_vision import add_toy_encoder, asking, picture

if TYPE_CHECKING:
    from pathlib import Path

Image: Any = pytest.importorskip("PIL.Image", reason="the extra [vision]")


def messages(url: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


def test_an_image_is_read_from_a_data_url(tiny: Path, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(picture(2)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
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
