"""Chat messages with images, as a prompt whose image tokens are read as embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.folder import Bundle
from outrider.bundle.manifest import MODEL_NAMES
from outrider.bundle.vision import VisionEntry
from outrider.errors import OptionError, RequestError, TooLong
from outrider.inputs.vision.encoder import VisionEncoder
from outrider.inputs.vision.images import MEMORY, is_data_url, read_image
from outrider.inputs.vision.tiles import PROCESSORS, cut_into_tiles, image_text
from outrider.types import ChatTokenizer, CompiledModel, Prompt, Span

_READS_PARTS = re.compile(r"""(\[['"]type['"]\]|\.type)\s*==\s*['"](image|text)['"]""")


class PartsTokenizer(ChatTokenizer, Protocol):
    """A tokenizer whose template may be given contents in parts."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answering: bool = True,
        parts: bool = False,
    ) -> str:
        """The text of chat messages. parts: whether their contents may be lists of parts."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as it stands in a prompt.

    text: the tokens that stand for it. tiles: of each the embeddings, float32 [tokens, hidden], and what identifies it.
    grid: see `Span`.
    """

    text: str
    tiles: tuple[tuple[NDArray[np.float32], bytes], ...]
    grid: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens have embeddings."""
        return sum(len(embeds) for embeds, _ in self.tiles)


def has_images(prompt: object) -> bool:
    """Whether a prompt is a list of messages one of which has a content in parts, with an image among them."""
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Sequence):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def check_images(prompt: object, vision: Vision | None) -> None:
    """Raise RequestError if a prompt has images that the main model cannot see."""
    if has_images(prompt) and not (vision and vision.sees):
        raise RequestError(
            "The prompt has an image, and the main model reads text only, as it was exported or on its device. Load a "
            "bundle of a model that sees images, on CPU or GPU."
        )


@dataclass(frozen=True)
class Vision:
    """A bundle's vision encoder, with the layout of its prompts. One image is decoded at a time.

        vision.prompt([{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                                    {"type": "text", "text": "What is this?"}]}], tokenizer)

    sees: whether the main model reads embeddings where it runs. max_tokens: of a prompt. memory: GB to decode an image
    in.

    Source: `SmolVLMProcessor.apply_chat_template` and `__call__` in Transformers.
    """

    entry: VisionEntry
    encoder: VisionEncoder
    sees: bool = True
    max_tokens: int | None = None
    memory: float = MEMORY
    _decoding: Lock = field(default_factory=Lock, repr=False, compare=False)

    @classmethod
    def of(cls, bundle: Bundle, main: CompiledModel, memory: float = MEMORY) -> Vision | None:
        """Of a bundle, where and as precisely as its main model runs; None if that reads text only."""
        entry = bundle.manifest.main.vision
        if entry is None:
            return None
        path = bundle.folder / entry.folder / MODEL_NAMES["openvino"][0]
        encoder = VisionEncoder(path, main.device, main.precision)
        max_tokens = bundle.manifest.main.geometry.context_length
        return cls(entry, encoder, main.capabilities.embeds_width > 0, max_tokens, memory)

    def prompt(self, messages: Any, tokenizer: PartsTokenizer, *, gone: Event | None = None, **laid_out: Any) -> Prompt:
        """Lay out messages with their images, or a text as one message. gone: ends it before the next image.

        laid_out: as of the tokenizer's `encode_prompt`.

        Raises:
            OptionError: when a message lacks its role or content.
            RequestError: when an image cannot be read, or the text has other places for images than there are.
            TooLong: when the images alone are more than the model's context.
        """
        if isinstance(messages, str):
            if not messages.strip():
                raise RequestError("The prompt is empty. Give at least one word.")
            messages = [{"role": "user", "content": messages}]
        text, images = self.render(messages, tokenizer, **laid_out)
        encoded = self._encode_all(images, gone)
        token_ids = tokenizer.encode_rendered(self.expand(text, encoded))
        return Prompt(token_ids, embeds=self.place(token_ids, encoded))

    def render(self, messages: Sequence[Any], tokenizer: PartsTokenizer, **options: Any) -> tuple[str, list[Any]]:
        """The text of messages, by the model's template, with one token for each image; and the images.

        Raises:
            OptionError: when a message lacks its role or content.
            RequestError: for an image that would have to be fetched, or when the template refuses the messages.
        """
        images: list[Any] = []
        laid_out = [self._message(message, i, images, tokenizer) for i, message in enumerate(messages)]
        return tokenizer.render(laid_out, parts=True, **options), images

    def encode(self, image: Any) -> EncodedImage:
        """Cut and encode an image. Raises as `read_image`, and DeviceError when the device fails."""
        with self._decoding:
            tiles = cut_into_tiles(read_image(image, self.memory), self.entry)
        embeds, keys = self.encoder.encode(tiles)
        grid = (tiles.rows, tiles.columns) if PROCESSORS[self.entry.layout].has_grid else None
        return EncodedImage(image_text(tiles, self.entry), tuple(zip(embeds, keys, strict=True)), grid)

    def _encode_all(self, images: Sequence[Any], gone: Event | None) -> list[EncodedImage]:
        encoded, num_tokens = list[EncodedImage](), 0
        for image in images:
            if gone is not None and gone.is_set():
                raise RequestError("The request was cancelled before all of its images were read.")
            encoded.append(self.encode(image))
            num_tokens += encoded[-1].num_tokens
            if self.max_tokens is not None and num_tokens > self.max_tokens:
                raise TooLong(
                    f"The first {len(encoded)} of {len(images)} images take {num_tokens:,} tokens, more than the "
                    f"model's context of {self.max_tokens:,}. Give fewer."
                )
        return encoded

    def expand(self, text: str, images: Sequence[EncodedImage], num_before: int = 0) -> str:
        """A rendered text, with all tokens of each image in the place of the one that stands for it.

        num_before: images of the conversation that stand before the text.

        Raises:
            RequestError: when the text has other places for images than there are.
        """
        before, *behind = text.split(self.entry.image_token)
        if len(behind) != len(images):
            raise RequestError(
                f"The prompt has {len(behind)} places for images ({self.entry.image_token}) and {len(images)} images. "
                "Give each image as a part of a message, and leave the token out of the text."
            )
        named = "<image_id>{}</image_id>" if self.entry.numbered else ""  # MiniCPM-V's
        numbers = [named.format(num_before + i) for i in range(len(images))]
        return before + "".join(map("".join, zip(numbers, (image.text for image in images), behind, strict=True)))

    def place(
        self, token_ids: Sequence[int], images: Sequence[EncodedImage], answers: Sequence[tuple[int, int]] = ()
    ) -> tuple[Span, ...]:
        """The images' embeddings, each tile's at its image tokens. answers: see `Prompt`; their tokens are no images'.

        Raises:
            RequestError: when there are other image tokens than the images have.
        """
        is_place = np.array(token_ids) == self.entry.image_token_id
        for begin, end in answers:
            is_place[begin:end] = False
        places = np.flatnonzero(is_place)
        tiles = [(*tile, image.grid) for image in images for tile in image.tiles]
        begins = np.cumsum([0, *(len(embeds) for embeds, *_ in tiles)])
        if len(places) != begins[-1]:
            raise RequestError(
                f"{len(tiles)} tiles of images have {len(places)} image tokens, and need {begins[-1]}: the bundle's "
                "tokenizer and vision encoder do not belong together. Export the bundle again."
            )
        whole = self.entry.both_ways != "none"
        return tuple(Span(int(places[begin]), *tile, whole) for begin, tile in zip(begins[:-1], tiles, strict=True))

    def _message(self, message: Any, place: int, images: list[Any], tokenizer: ChatTokenizer) -> Any:
        """A message as the template takes it; its images are added to `images`."""
        if not isinstance(message, Mapping) or message.get("content") is None:
            return message  # refused by the tokenizer, or one with calls of tools
        content = message["content"]
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(given, list | tuple) or not given:
            raise OptionError(f"Message {place} of the prompt has no content. Give a text, or a list of parts.")
        parts = [self._part(part, place, images) for part in given]
        if _READS_PARTS.search(tokenizer.chat_template):  # other templates write a text only
            return {**message, "content": parts}
        texts = [part.get("text", self.entry.image_token) for part in parts]
        return {**message, "content": PROCESSORS[self.entry.layout].joint.join(texts)}

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
            if not is_data_url(url):
                raise RequestError(
                    f"Message {place} has the image_url {str(url)[:60]!r}, and images are never fetched. Give the "
                    "image itself, as data:image/…;base64,…"
                )
            images.append(url)
            return {"type": "image"}
        raise OptionError(
            f"Message {place} of the prompt has a part of type {kind!r} that is not known. Give {{'type': 'text', "
            "'text': …} or {'type': 'image', 'image': …}."
        )
