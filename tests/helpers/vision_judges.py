"""What Transformers and publishers' code make of images: a judge of the families of `tiny_vision`, and of MiniCPM-V.

judge = Judge(folder, "qwen3_vl")       # writes the checkpoint
seen = judge.seen(images, entry)        # of images, as Transformers' processor prepares them
judge.embeds(seen), judge.answer(token_ids, seen, place, banned)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from minicpm import minicpm_tokenizer, write_minicpm
from outrider.inputs.vision.grids import patches_of
from recorded import RecordedVision
from tiny_vision import FAMILIES, PARTS_TEMPLATE, vision_tokenizer, write_vision_checkpoint


@dataclass(frozen=True)
class Seen:
    """inputs: of the model. pixels: of each image, as `Tiles` has them. texts: their tokens, if it says them."""

    inputs: dict[str, Any]
    pixels: list[Any]
    texts: list[str] | None = None


def _divided(pixels: Any, counts: Any) -> list[Any]:
    return np.split(np.asarray(pixels), np.cumsum(counts)[:-1])


def _tile_by_tile(patches: Any, rows: int, columns: int) -> Any:
    """Patches that stand row by row, in tiles of two by two."""
    grid = np.asarray(patches)[: rows * columns].reshape(rows // 2, 2, columns // 2, 2, -1)
    return grid.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def _smolvlm(folder: Path, images: list[Any], _: Any) -> Seen:
    from transformers.models.idefics3.processing_idefics3 import get_image_prompt_string
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    processor = SmolVLMImageProcessorPil.from_pretrained(folder)
    seen = processor([[Image.fromarray(each) for each in images]], return_tensors="pt", return_row_col_info=True)
    sizes = [*zip(seen.pop("rows")[0], seen.pop("cols")[0], strict=True)]
    names = ("<fake_token_around_image>", "<image>", "<global-img>")
    texts = [get_image_prompt_string(*size, 4, *names) for size in sizes]
    return Seen(dict(seen), _divided(seen["pixel_values"][0], [rows * columns + 1 for rows, columns in sizes]), texts)


def _internvl(folder: Path, images: list[Any], _: Any) -> Seen:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = GotOcr2ImageProcessorPil.from_pretrained(folder, crop_to_patches=True)
    seen = processor([Image.fromarray(each) for each in images], return_tensors="pt")
    counts = [int(each) for each in seen["num_patches"]]
    texts = [f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>" for count in counts]  # as InternVLProcessor writes them
    return Seen({"pixel_values": seen["pixel_values"]}, _divided(seen["pixel_values"], counts), texts)


def _qwen(folder: Path, images: list[Any], _: Any) -> Seen:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    seen = dict(processor([Image.fromarray(image) for image in images], return_tensors="pt"))
    return Seen(seen, _divided(seen["pixel_values"], seen["image_grid_thw"].prod(1).tolist()))


def _gemma3(folder: Path, images: list[Any], entry: Any) -> Seen:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    processor = Gemma3ImageProcessorPil.from_pretrained(folder)
    seen = processor([Image.fromarray(image) for image in images], return_tensors="pt")
    crops = [int(each) for each in seen["num_crops"]]
    texts = []
    for count in crops:
        whole: Any = SimpleNamespace(
            image_processor=lambda *_, count=count, **__: {"num_crops": [count]},
            tokenizer=lambda text, **_: {"text": text, "input_ids": []},
            full_image_sequence=entry.around_token + "<image_soft_token>" * 16 + entry.end_token,
            boi_token=entry.image_token,
        )
        whole.image_processor.fetch_images = lambda images: images
        whole.tokenizer.init_kwargs = {}
        whole._merge_kwargs = lambda *_, **__: {"images_kwargs": {}, "text_kwargs": {}}
        whole._check_special_mm_tokens = lambda *_, **__: None
        texts.append(Gemma3Processor.__call__(whole, [[images[0]]], ["<start_of_image>"])["text"][0])
    inputs = {"pixel_values": seen["pixel_values"]}
    return Seen(inputs, _divided(seen["pixel_values"], [1 + count for count in crops]), texts)


def _gemma4(folder: Path, images: list[Any], _: Any) -> Seen:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    options = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))["image_processor"]
    seen = Gemma4ImageProcessorPil(**options)([Image.fromarray(image) for image in images], return_tensors="pt")
    inputs = {name: seen[name] for name in ("pixel_values", "image_position_ids")}
    sizes = [(places.amax(0) + 1).tolist() for places in seen["image_position_ids"]]
    both = zip(seen["pixel_values"], sizes, strict=True)
    return Seen(inputs, [_tile_by_tile(patches, rows, columns) for patches, (columns, rows) in both])


def _mistral3(folder: Path, images: list[Any], entry: Any) -> Seen:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    given = [Image.fromarray(image) for image in images]
    seen = dict(PixtralImageProcessorPil.from_pretrained(folder)(given, patch_size=8, return_tensors="pt"))
    sizes = [tuple(map(int, size)) for size in seen["image_sizes"]]
    both = zip(seen["pixel_values"], sizes, strict=True)
    texts = [("[IMG_BREAK]".join(["[IMG]" * (w // 8)] * (h // 8)) + "[IMG_END]") for h, w in sizes]
    return Seen(seen, [patches_of(each[:, :h, :w].numpy(), entry) for each, (h, w) in both], texts)


def _llava_next(folder: Path, images: list[Any], _: Any) -> Seen:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    processor = LlavaNextImageProcessorPil.from_pretrained(folder)
    seen = dict(processor([Image.fromarray(image) for image in images], return_tensors="pt"))
    counts = [image_size_to_num_patches(list(each.shape[:2]), processor.image_grid_pinpoints, 18) for each in images]
    whole: Any = SimpleNamespace(image_processor=processor, patch_size=4, num_additional_image_tokens=0)
    whole._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(whole)
    numbers = [LlavaNextProcessor._get_number_of_features(whole, *image.shape[:2], 18, 18) for image in images]
    pixels = [each[:count].numpy() for each, count in zip(seen["pixel_values"], counts, strict=True)]
    return Seen(seen, pixels, ["<image>" * number for number in numbers])


def _lfm2(folder: Path, images: list[Any], _: Any) -> Seen:
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    processor = Lfm2VlImageProcessor.from_pretrained(folder)
    given = [np.ascontiguousarray(image.transpose(2, 0, 1)) for image in images]
    seen = dict(processor(given, do_convert_rgb=False, return_row_col_info=True, return_tensors="pt"))
    rows, columns, sizes = (np.array([*map(np.array, seen.pop(f"image_{name}"))]) for name in ("rows", "cols", "sizes"))
    shapes = zip(seen["pixel_values"].numpy(), seen["spatial_shapes"].tolist(), strict=True)
    parts = [_tile_by_tile(patches, height, width) for patches, (height, width) in shapes]
    names = {"image": "image", "start": "image_start", "end": "image_end", "thumbnail": "img_thumbnail"}
    tokens = {f"image_{part}_token": f"<|{name}|>" for part, name in names.items()}
    whole: Any = SimpleNamespace(**tokens | {"image_token": "<image>"})
    pixels, texts = [], []
    for count, across, (height, width) in zip(rows.ravel(), columns.ravel(), sizes.reshape(-1, 2), strict=True):
        num_parts = int(count * across + (count * across > 1))
        pixels.append(np.concatenate(parts[:num_parts]))
        parts = parts[num_parts:]
        of_whole = int(height * width // 64)
        texts.append(Lfm2VlProcessor._build_image_tokens(whole, int(count), int(across), 4, of_whole, True, True))
    assert not parts
    return Seen(seen, pixels, texts)


_PROCESSORS = {
    "smolvlm": _smolvlm, "internvl": _internvl, "qwen": _qwen, "gemma3": _gemma3, "gemma4": _gemma4,
    "mistral3": _mistral3, "llava_next": _llava_next, "lfm2_vl": _lfm2,
}  # fmt: skip


def have_pillow_resize(monkeypatch: Any) -> None:
    """Have Transformers' processors that need torchvision resize with Pillow, and normalise as torchvision does."""
    from transformers.image_processing_backends import TorchvisionBackend

    def resize(_: Any, images: Any, size: Any, resample: Any = None, **__: Any) -> Any:
        made: list[Any] = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images]
        made = [np.asarray(each.resize((size.width, size.height), resample=2)) for each in made]
        return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)

    def rescale_and_normalize(_: Any, images: Any, __: Any, factor: float, ___: Any, mean: Any, std: Any) -> Any:
        mean, std = (torch.tensor(each)[:, None, None] * (1.0 / factor) for each in (mean, std))
        return images.float().sub(mean).div(std)

    monkeypatch.setattr(TorchvisionBackend, "resize", resize)
    monkeypatch.setattr(TorchvisionBackend, "rescale_and_normalize", rescale_and_normalize)


class RecordedJudge:
    """The same of "gemma4_unified" and "minicpm 4.5", by what is recorded of pictures of some sizes."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.recorded = folder, RecordedVision.of(family)
        if family.startswith("minicpm"):
            write_minicpm(folder, family.split()[1])
        else:
            template = PARTS_TEMPLATE.replace("<image>", FAMILIES["gemma4"].place)
            self.recorded.write(folder, vision_tokenizer("gemma4"), template)

    def load(self) -> RecordedJudge:
        return self

    def seen(self, images: list[Any], entry: Any) -> Seen:
        return Seen({"sizes": " ".join(f"{image.shape[0]}x{image.shape[1]}" for image in images)}, [])

    def error_of(self, found: Any, seen: Seen) -> float:
        expected = np.array(self.recorded.embeds[seen.inputs["sizes"]])
        return float(np.abs(found[::3, ::16] - expected).max() / self.recorded.largest)

    def answer(self, token_ids: list[int], seen: Seen | None, place: int, banned: list[int]) -> list[int]:
        return self.recorded.answers[seen.inputs["sizes"] if seen else ""]


def judge_of(folder: Path, family: str) -> Any:
    return (Judge if family in FAMILIES else RecordedJudge)(folder, family)


def tokenizer_of(family: str) -> Any:
    """The tests' tokenizer with a family's tokens around images."""
    if family.startswith("minicpm"):
        return minicpm_tokenizer(family.split()[1])
    return vision_tokenizer(family.removesuffix("_unified"))


class Judge:
    """A checkpoint, and Transformers' model of it."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family, self.folder = family, folder
        write_vision_checkpoint(folder, family)

    def load(self) -> Judge:
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()
        return self

    def seen(self, images: list[Any], entry: Any) -> Seen:
        make = next(make for name, make in _PROCESSORS.items() if self.family.startswith(name))
        return make(self.folder, images, entry)

    def error_of(self, embeds: Any, seen: Seen) -> float:
        """The largest difference of embeddings float32 [tokens, width] of all images, as a share of the largest."""
        found = self.model.model.get_image_features(**seen.inputs)
        made = torch.cat([each.reshape(-1, each.shape[-1]) for each in found.pooler_output])
        deep = (found.get("deepstack_features") or []) if hasattr(found, "get") else []
        made = torch.cat([made, *deep], dim=1).detach().numpy()
        made = made * 3 if self.family == "llava_next" else made  # as all that this language model reads
        return float(np.abs(embeds - made).max() / np.abs(made).max())

    def answer(self, token_ids: list[int], seen: Seen | None, place: int, banned: list[int]) -> list[int]:
        """Transformers' own greedy answer of 40 tokens. place: the id of the token that stands for images."""
        ids = torch.tensor([token_ids])
        inputs: dict[str, Any] = {} if seen is None else dict(seen.inputs)
        if self.family.startswith(("gemma", "qwen")) and (inputs or self.family.startswith("gemma")):
            types = "token_type_ids" if self.family.startswith("gemma3") else "mm_token_type_ids"
            inputs[types] = (ids == place).int()
        options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": -1, "suppress_tokens": banned}
        made = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **options)
        answer: list[int] = made[0, ids.shape[1] :].tolist()
        return answer
