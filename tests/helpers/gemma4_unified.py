"""Gemma 4 12B (`gemma4_unified`), which has no vision encoder, in PyTorch: a judge for Transformers before 5.10.

    embedder = unify(checkpoint, folder)    # a Gemma 4's text, with an embedder of pixels, as it is published
    embedder.judge(model)                   # the Gemma 4 reads images through it

The text part is Gemma 4's. Facts from Transformers 5.24: with the same weights its embeddings differ by 2e-7 of the
largest, and its logits by 2e-6, with the masks that its `create_masks_for_generate` makes. Its `forward` alone has
tokens of an image attend to later ones in all layers, and not only where there is a window as in Google's code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

_WIDTH, _PLACES = 40, 64


class Embedder(nn.Module):  # type: ignore[misc]
    """Makes a token of each tile of pixels. patch: pixels along the edge of a patch, `pooled` of which a tile has."""

    def __init__(self, patch: int, pooled: int, hidden: int) -> None:
        super().__init__()
        self.patch, self.pooled = patch, pooled
        values = 3 * (patch * pooled) ** 2
        self.patch_ln1, self.patch_dense = nn.LayerNorm(values), nn.Linear(values, _WIDTH)
        self.patch_ln2, self.pos_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.pos_embedding = nn.Parameter(torch.zeros(_PLACES, 2, _WIDTH))
        self.embedding_projection = nn.Linear(_WIDTH, hidden, bias=False)

    def tiles(self, patches: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pixels of tiles, and their columns and rows. patches, places: of an image, row by row."""
        is_there = places[:, 0] >= 0
        columns, rows = (int(edge) + 1 for edge in places.amax(0))
        edge, count = self.patch, self.pooled
        apart = patches[is_there].reshape(rows // count, count, columns // count, count, edge, edge, 3)
        pixels = apart.permute(0, 2, 1, 4, 3, 5, 6).reshape(-1, 3 * (edge * count) ** 2)
        down, along = torch.meshgrid(torch.arange(rows // count), torch.arange(columns // count), indexing="ij")
        return pixels, torch.stack([along.flatten(), down.flatten()], dim=1)

    def forward(self, pixels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        read = self.patch_ln2(self.patch_dense(self.patch_ln1(pixels)))
        read = self.pos_norm(read + self.pos_embedding[places[:, 0], 0] + self.pos_embedding[places[:, 1], 1])
        return self.embedding_projection(read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + 1e-6))

    def judge(self, model: Any) -> None:
        """Have a Gemma 4 of Transformers read images through this."""

        def features(pixel_values: torch.Tensor, image_position_ids: torch.Tensor, **_: Any) -> Any:
            images = zip(pixel_values, image_position_ids, strict=True)
            return SimpleNamespace(pooler_output=torch.cat([self(*self.tiles(*image)) for image in images]))

        model.model.get_image_features = features


def unify(checkpoint: Path, folder: Path) -> Embedder:
    """Write a Gemma 4's checkpoint as one of the 12B's kind, with random weights for images."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    encoder = config["vision_config"]
    patch, pooled, hidden = encoder["patch_size"], encoder["pooling_kernel_size"], config["text_config"]["hidden_size"]
    torch.manual_seed(0)
    embedder: Embedder = Embedder(patch, pooled, hidden).float().eval()
    for name, parameter in embedder.named_parameters():
        nn.init.normal_(parameter, 1.0 if "weight" in name and ("ln" in name or "norm" in name) else 0.0, 0.3)
    tensors = load_file(folder / "model.safetensors")
    text = {name: each for name, each in tensors.items() if not name.startswith(("model.vision_", "model.embed_v"))}
    of_images = {
        f"model.{'embed_vision' if name.startswith('embedding_') else 'vision_embedder'}.{name}": each
        for name, each in embedder.state_dict().items()
    }
    save_file(text | of_images, folder / "model.safetensors")
    config |= {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified",
        "text_config": config["text_config"] | {"model_type": "gemma4_unified_text"},
        "vision_config": {
            "mm_embed_dim": _WIDTH, "mm_posemb_size": _PLACES, "model_patch_size": patch * pooled,
            "model_type": "gemma4_unified_vision", "num_soft_tokens": 70, "output_proj_dims": _WIDTH,
            "patch_size": patch, "pooling_kernel_size": pooled, "rms_norm_eps": 1e-6,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    processor = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    processor["image_processor"]["image_processor_type"] = "Gemma4UnifiedImageProcessor"
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return embedder
