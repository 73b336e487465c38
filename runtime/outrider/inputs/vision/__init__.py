"""Images in prompts: preprocessing, the vision encoder, and the prompt that has their embeddings.

    vision = Vision.of(bundle, main_backend)
    vision.prompt(messages, tokenizer)    # a Prompt whose image tokens are read as embeddings

An image is a file's path, a file's bytes, a `data:` URL, an image of Pillow's, or an array uint8 [height, width, 3].
Nothing is fetched from the network. Needs the extra: pip install "outrider[vision]".

`images`: reads an image. `tiles`: the layouts, each an `ImageProcessor` in a file of its own. `grids`: patches of
images that keep their form. `encoder`: from tiles to embeddings. `prompts`: messages with images, as a prompt.
"""

from outrider.inputs.vision.encoder import VisionEncoder
from outrider.inputs.vision.images import read_image, to_data_url
from outrider.inputs.vision.processor import Tiles
from outrider.inputs.vision.prompts import EncodedImage, Vision, check_images, has_images
from outrider.inputs.vision.tiles import cut_into_tiles, image_text

__all__ = [
    "EncodedImage", "Tiles", "Vision", "VisionEncoder", "check_images", "cut_into_tiles", "has_images", "image_text",
    "read_image", "to_data_url",
]  # fmt: skip
