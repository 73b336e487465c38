"""Writes a checkpoint's vision encoder as a graph, without PyTorch.

write_encoder(folder, config, "qwen", output, "int8")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from outrider.bundle.vision import ImageLayout
from outrider_export.direct.gemma_encoder import Gemma3Encoder, gemma4_encoder
from outrider_export.direct.minicpm_encoders import MiniCpm46Encoder, MiniCpmEncoder
from outrider_export.direct.qwen_encoder import QwenEncoder
from outrider_export.direct.tower_encoders import Lfm2Encoder, LlavaNextEncoder, PixtralEncoder
from outrider_export.direct.vision_graph import VisionGraph

_ENCODERS: dict[ImageLayout, Callable[[Path, Mapping[str, Any], str], VisionGraph]] = {
    "gemma3": Gemma3Encoder,
    "gemma4": gemma4_encoder,
    "lfm2": Lfm2Encoder,
    "llava_next": LlavaNextEncoder,
    "minicpm": MiniCpmEncoder,
    "minicpm4_6": MiniCpm46Encoder,
    "pixtral": PixtralEncoder,
    "qwen": QwenEncoder,
}


def write_encoder(folder: Path, config: Mapping[str, Any], layout: ImageLayout, output: Path, weights: str) -> None:
    """Write a checkpoint's vision encoder. config: its config.json. output: a new folder. weights: the main model's.

    Raises:
        ExportError: when a tensor is missing.
    """
    model = _ENCODERS[layout](folder, config, weights).model()
    output.mkdir(parents=True)
    ov.save_model(model, output / "openvino_model.xml", compress_to_fp16=False)
