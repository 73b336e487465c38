"""Chat messages with images, as a prompt whose image tokens are read as embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.bundle.manifest import MODEL_NAMES
from outrider.errors import OptionError, RequestError
from outrider.types import Prompt, Span
from outrider.vision.encoder import VisionEncoder
from outrider.vision.images import read_image
from outrider.vision.tiles import cut_into_tiles, image_text

_READS_PARTS = re.compile(r"""(\[['"]type['"]\]|\.type)\s*==\s*['"](image|text)['"]""")

if TYPE_CHECKING:
    from outrider.bundle.folder import Bundle
    from outrider.bundle.manifest import VisionEntry
    from outrider.types import ChatTokenizer, CompiledModel

    class PartsTokenizer(ChatTokenizer, Protocol):
        """A tokenizer whose template may be given contents in parts."""

        def render(
            self,
            messages: Seq[Mapping[str, Any]],
            *,
            tools: Seq[Mapping[str, Any]] = (),
            answering: bool = True,
            parts: bool = False,
        ) -> str:
            """The text of chat messages. parts: whether their contents may be lists of parts."""


def has_images(prompt: object) -> bool:
    """Whether a prompt is a list of messages one of which has a content in parts, with an image among them."""
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Seq):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


@dataclass(frozen=True)
class Vision:
    """A bundle's vision encoder, with the layout of its prompts.

        vision.prompt([{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                                    {"type": "text", "text": "What is this?"}]}], tokenizer)

    Source: `SmolVLMProcessor.apply_chat_template` and `__call__` in Transformers.
    """

    entry: VisionEntry
    encoder: VisionEncoder

    @classmethod
    def of(cls, bundle: Bundle, main: CompiledModel) -> Vision | None:
        """Of a bundle, where and as precisely as its main model runs; None if that reads text only."""
        entry = bundle.manifest.main.vision
        if entry is None:
            return None
        path = bundle.folder / entry.folder / MODEL_NAMES["openvino"][0]
        return cls(entry, VisionEncoder(path, main.device, main.precision))

    def prompt(self, messages: Any, tokenizer: PartsTokenizer, *, tools: Seq[Mapping[str, Any]] = ()) -> Prompt:
        """Lay out messages with their images, or a text as one message.

        Raises:
            OptionError: when a message lacks its role or content.
            RequestError: when an image cannot be read, or the text has other places for images than there are.
        """
        if isinstance(messages, str):
            if not messages.strip():
                raise RequestError("The prompt is empty. Give at least one word.")
            messages = [{"role": "user", "content": messages}]
        images: list[Any] = []
        laid_out = [self._message(message, i, images, tokenizer) for i, message in enumerate(messages)]
        text = tokenizer.render(laid_out, tools=tools, parts=True)
        before, *behind = text.split(self.entry.image_token)
        if len(behind) != len(images):
            raise RequestError(
                f"The prompt has {len(behind)} places for images ({self.entry.image_token}) and {len(images)} images. "
                "Give each image as a part of a message, and leave the token out of the text."
            )
        spans: list[tuple[np.ndarray[Any, Any], bytes]] = []
        for image, rest in zip(images, behind, strict=True):
            tiles = cut_into_tiles(read_image(image), self.entry)
            before += image_text(tiles, self.entry) + rest
            embeds, keys = self.encoder.encode(tiles)
            spans += zip(embeds, keys, strict=True)
        token_ids = tokenizer.encode_rendered(before)
        return Prompt(token_ids, embeds=self._placed(token_ids, spans))

    def _placed(self, token_ids: list[int], spans: list[tuple[Any, bytes]]) -> tuple[Span, ...]:
        """The tiles' embeddings, each at its image tokens."""
        count = self.entry.tokens_per_tile
        places = np.flatnonzero(np.array(token_ids) == self.entry.image_token_id)
        if len(places) != count * len(spans) or any(len(embeds) != count for embeds, _ in spans):
            raise RequestError(
                f"{len(spans)} tiles of images have {len(places)} image tokens, and each needs {count}: the bundle's "
                "tokenizer and vision encoder do not belong together. Export the bundle again."
            )
        begins = places[::count]
        return tuple(Span(int(begin), *each) for begin, each in zip(begins, spans, strict=True))

    def _message(self, message: Any, place: int, images: list[Any], tokenizer: ChatTokenizer) -> Any:
        """A message as the template takes it; its images are added to `images`."""
        if not isinstance(message, Mapping) or message.get("content") is None:
            return message  # refused by the tokenizer, or one with calls of tools
        content = message["content"]
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(given, list | tuple) or not given:
            raise OptionError(f"Message {place} of the prompt has no content. Give a text, or a list of parts.")
        parts = [self._part(part, place, images) for part in given]
        if self._takes_parts(tokenizer):
            return {**message, "content": parts}
        return {**message, "content": "".join(part.get("text", self.entry.image_token) for part in parts)}

    def _part(self, part: Any, place: int, images: list[Any]) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind == "image" and part.get("image") is not None:
            images.append(part["image"])
            return {"type": "image"}
        if kind == "image_url":
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, Mapping) else url
            if not isinstance(url, str) or not url.startswith("data:"):
                raise RequestError(
                    f"Message {place} has the image_url {str(url)[:60]!r}, and nothing is fetched. Give the image "
                    "itself, as data:image/…;base64,…"
                )
            images.append(url)
            return {"type": "image"}
        raise OptionError(
            f"Message {place} of the prompt has a part of type {kind!r} that is not known. Give {{'type': 'text', "
            "'text': …} or {'type': 'image', 'image': …}."
        )

    def _takes_parts(self, tokenizer: ChatTokenizer) -> bool:
        """Whether the chat template reads contents in parts; others write a text only."""
        return bool(_READS_PARTS.search(tokenizer.chat_template))
