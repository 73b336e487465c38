"""The images of a conversation: what is kept of them in its messages, and how they are read in its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.inputs.vision import EncodedImage, Vision, to_data_url


def keep_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message whose images are `data:` URLs: files may change, and a chat's messages are saved as JSON.

    Raises:
        RequestError: when an image cannot be read.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [_kept(part) for part in content]}


def _kept(part: Any) -> Any:
    """A copy of a part. What is no part fails when it is rendered."""
    if not isinstance(part, Mapping):
        return part
    is_image = part.get("type") == "image" and part.get("image") is not None
    return {**part, "image": to_data_url(part["image"])} if is_image else dict(part)


class Seen:
    """The images of a conversation's messages, each encoded once while it is among them.

    vision: of the main model. encoded: the images that are known already, by their URLs.
    """

    def __init__(self, vision: Vision, encoded: Mapping[str, EncodedImage] | None = None) -> None:
        self.vision = vision
        self._encoded = dict(encoded or {})

    def encode(self, images: Sequence[str]) -> list[EncodedImage]:
        """Encode all images of the conversation, which are `data:` URLs. Others are forgotten."""
        known = self._encoded
        self._encoded = {image: known.get(image) or self.vision.encode(image) for image in dict.fromkeys(images)}
        return [self._encoded[image] for image in images]

    def copy(self) -> Seen:
        """Of a conversation that goes on apart."""
        return Seen(self.vision, self._encoded)
