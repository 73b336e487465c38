"""The layouts of images, by the manifest's names for them."""

from __future__ import annotations

from typing import Any

from outrider.bundle.vision import ImageLayout, VisionEntry
from outrider.inputs.vision.gemma import Gemma3Processor, Gemma4Processor
from outrider.inputs.vision.idefics3 import Idefics3Processor
from outrider.inputs.vision.internvl import InternVLProcessor
from outrider.inputs.vision.lfm2 import Lfm2Processor
from outrider.inputs.vision.llava_next import LlavaNextProcessor
from outrider.inputs.vision.minicpm import MiniCpm46Processor, MiniCpmProcessor
from outrider.inputs.vision.pixtral import PixtralProcessor
from outrider.inputs.vision.processor import ImageProcessor, Tiles
from outrider.inputs.vision.qwen import QwenProcessor

PROCESSORS: dict[ImageLayout, ImageProcessor[Any]] = {
    "gemma3": Gemma3Processor(),
    "gemma4": Gemma4Processor(),
    "idefics3": Idefics3Processor(),
    "internvl": InternVLProcessor(),
    "lfm2": Lfm2Processor(),
    "llava_next": LlavaNextProcessor(),
    "minicpm": MiniCpmProcessor(),
    "minicpm4_6": MiniCpm46Processor(),
    "pixtral": PixtralProcessor(),
    "qwen": QwenProcessor(),
}


def cut_into_tiles(image: Any, vision: VisionEntry) -> Tiles:
    """What the encoder reads of an image of Pillow's in RGB. Raises RequestError when the image is too narrow."""
    return PROCESSORS[vision.layout].cut(image, vision)


def image_text(tiles: Tiles, vision: VisionEntry) -> str:
    """The tokens that stand for an image in a prompt, as text."""
    return PROCESSORS[vision.layout].text(tiles, vision)
