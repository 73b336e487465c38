"""MiniCPM-V in PyTorch: a judge, since its code is in its checkpoints (2.6 to 4.5) or in newer Transformers (4.6).

    model = write_minicpm_checkpoint(folder, "4.5")
    model.image_embeds([pixels])    # of the parts of an image, each float32 [3, height, width]

SigLIP's layers and the language models are those of Transformers. Facts from the publishers' modeling_minicpmv.py,
modeling_navit_siglip.py and resampler.py, and from modeling_minicpmv4_6.py of Transformers 5.24: with the same weights,
the embeddings are theirs to 1e-6 of the largest, and 4.6's greedy tokens are equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipEncoder

from tiny import SPECIAL, train_tokenizer
from tiny_vision import NUM_TOKENS, PARTS_TEMPLATE

AROUND = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
KINDS = {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3", "4.6": "qwen3_5_text"}  # of text parts, by version
SCALE, PATCH, MOST = 32, 4, 4  # pixels, and slices
SIDE = 16  # of the grid of learned positions
QUERIES = 6
_WIDTH, _HIDDEN = 32, 256
_IN_SHAPE: dict[str, Any] = {
    "vocab_size": NUM_TOKENS, "hidden_size": _HIDDEN, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
    "pad_token_id": 400, "eos_token_id": 402, "bos_token_id": 400, "tie_word_embeddings": False,
}  # fmt: skip
_STATES: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
    },
}  # fmt: skip


class Tower(nn.Module):  # type: ignore[misc]
    """SigLIP's encoder for patches in their own form."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.side = config.image_size // patch
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, width, patch, patch),
                "position_embedding": nn.Embedding(self.side**2, width),
            }
        )
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def embedded(self, pixels: torch.Tensor, *, is_new: bool) -> torch.Tensor:
        """float32 [1, patches, width]. is_new: of 4.6, which divides places otherwise."""
        made = self.embeddings["patch_embedding"](pixels[None])
        buckets = [learned_places(count, self.side, is_new=is_new) for count in made.shape[2:]]
        ids = (buckets[0][:, None] * self.side + buckets[1]).flatten()
        return made.flatten(2).transpose(1, 2) + self.embeddings["position_embedding"](ids)


def learned_places(count: int, side: int, *, is_new: bool) -> torch.Tensor:
    """Which learned row, or column, so many patches have."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    places = (
        torch.arange(count) / count if is_new else torch.arange(0, 1 - 1e-6, 1 / torch.tensor(count, dtype=torch.int32))
    )
    return torch.bucketize(places, borders, right=True)


class Resampler(nn.Module):  # type: ignore[misc]
    """Learned queries attend to a part's patches."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(QUERIES, hidden))
        self.kv_proj = nn.Linear(width, hidden, bias=False)
        self.attn = nn.MultiheadAttention(hidden, hidden // 128, batch_first=True)
        for name in ("ln_q", "ln_kv", "ln_post"):
            self.add_module(name, nn.LayerNorm(hidden, eps=1e-6))
        self.proj = nn.Parameter(torch.zeros(hidden, hidden))

    def forward(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        values = self.ln_kv(self.kv_proj(x))
        count = values.shape[-1] // 4
        rates = 1 / 10_000 ** (torch.arange(count) / count)
        down, along = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = [place.flatten()[:, None] * rates for place in (along, down)]
        placed = torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)
        found, _ = self.attn(self.ln_q(self.query)[None], values + placed, values)
        return self.ln_post(found) @ self.proj


def _mlp(width: int, made: int, output: int, **norm: float) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "pre_norm": nn.LayerNorm(width, **norm),
            "linear_1": nn.Linear(width, made),
            "linear_2": nn.Linear(made, output),
        }
    )


def _in_fours(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Rows [1, rows · columns, width] as [windows, 4, width]."""
    apart = x.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2)
    return apart.reshape(-1, 4, x.shape[-1])


class MiniCpm(nn.Module):  # type: ignore[misc]
    """version: one of `KINDS`."""

    def __init__(self, version: str, vision: SiglipVisionConfig, text: Any) -> None:
        super().__init__()
        self.is_new, width = version == "4.6", vision.hidden_size
        self.vpm = Tower(vision)
        self.llm = AutoModelForCausalLM.from_config(text)
        if self.is_new:
            self.inserted = _mlp(4 * width, 4 * vision.intermediate_size, width, eps=vision.layer_norm_eps)
            self.inserted["self_attn"] = SiglipAttention(vision)
            self.inserted["layer_norm1"] = nn.LayerNorm(width, eps=vision.layer_norm_eps)
            self.merger = _mlp(4 * width, 4 * width, text.hidden_size, eps=1e-6)
        else:
            self.resampler = Resampler(width, text.hidden_size)

    def image_embeds(self, parts: list[Any]) -> torch.Tensor:
        """Of one image, float32 [tokens, hidden]. parts: float32 [3, height, width]."""
        with torch.no_grad():
            return torch.cat([self._of_part(torch.as_tensor(part)) for part in parts])

    def _of_part(self, pixels: torch.Tensor) -> torch.Tensor:
        rows, columns = (length // PATCH for length in pixels.shape[1:])
        x = self.vpm.embedded(pixels, is_new=self.is_new)
        for i, layer in enumerate(self.vpm.encoder.layers):
            x = layer(x, None)
            if self.is_new and not i:
                x = self._inserted(x, rows, columns)
        x = self.vpm.post_layernorm(x)
        if not self.is_new:
            return self.resampler(x, rows, columns)[0]
        x = self.merger["pre_norm"](_in_fours(x, rows // 2, columns // 2).flatten(1))
        return self.merger["linear_2"](nn.functional.gelu(self.merger["linear_1"](x)))

    def _inserted(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        windows, parts = _in_fours(x, rows, columns), self.inserted
        windows = windows + parts["self_attn"](parts["layer_norm1"](windows), None)[0]
        made = nn.functional.gelu(parts["linear_1"](parts["pre_norm"](windows.flatten(1))), approximate="tanh")
        return (parts["linear_2"](made) + windows.mean(1))[None]

    def greedy(self, token_ids: list[int], place: int, embeds: list[torch.Tensor], banned: list[int]) -> list[int]:
        """The next 40 tokens of a prompt, whose tokens `place` are read as embeddings."""
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            read = self.llm.get_input_embeddings()(ids)
            if embeds:
                read[ids == place] = torch.cat(embeds)
            made = self.llm.generate(
                inputs_embeds=read, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40,
                eos_token_id=-1, suppress_tokens=banned,
            )  # fmt: skip
        answer: list[int] = made[0].tolist()
        return answer


def image_token_of(version: str) -> str:
    return "<|image_pad|>" if version == "4.6" else "<unk>"


def minicpm_tokenizer(version: str) -> Any:
    """The tests' tokenizer with the tokens around images."""
    return train_tokenizer(special=(*SPECIAL, *AROUND, image_token_of(version), *(f"<extra_{i}>" for i in range(5))))


def published_names(name: str) -> str:
    """4.6's name of a tensor of the judge's."""
    for ours, theirs in (
        ("vpm.", "model.vision_tower."), ("inserted.", "model.vision_tower.vit_merger."),
        ("merger.", "model.merger.mlp.0."), ("llm.model.", "model.language_model."), ("llm.lm_head.", "lm_head."),
    ):  # fmt: skip
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def write_minicpm_checkpoint(folder: Path, version: str, seed: int = 0) -> MiniCpm:
    """A random MiniCPM-V in the layout of OpenBMB's files."""
    from safetensors.torch import save_file

    tokenizer = minicpm_tokenizer(version)
    is_new = version == "4.6"
    vision = {
        "hidden_size": _WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE * PATCH, "patch_size": PATCH,
    }  # fmt: skip
    text = _IN_SHAPE | (_STATES if is_new else {})
    config = AutoConfig.for_model(KINDS[version], **text)
    torch.manual_seed(seed)
    model: MiniCpm = MiniCpm(version, SiglipVisionConfig(**vision), config).float().eval()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("norm", "ln_")):
            nn.init.normal_(parameter, std=0.1 if name.startswith("llm.") else 0.2)
    folder.mkdir()
    tensors = model.state_dict()
    if is_new:
        tensors = {published_names(name): each for name, each in tensors.items()}
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    images: dict[str, Any] = {
        "max_slice_nums": MOST, "scale_resolution": SCALE, "patch_size": PATCH, "use_image_id": True,
        "slice_mode": True,
    }  # fmt: skip
    if is_new:
        ids = {"image_token_id": tokenizer.token_to_id("<|image_pad|>"), "video_token_id": 415}
        whole = {
            "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "model_type": "minicpmv4_6",
            "text_config": text | {"model_type": KINDS[version]}, "insert_layer_id": 0, "image_size": SIDE * PATCH,
            "vision_config": vision | {"model_type": "minicpmv4_6_vision"}, "tie_word_embeddings": False, **ids,
        }  # fmt: skip
        images |= {"image_processor_type": "MiniCPMV4_6ImageProcessor", "downsample_mode": "16x"}
    else:
        whole = text | {
            "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": float(version), "query_num": QUERIES,
            "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"}, "vision_config": vision | {"model_type": "siglip"},
            "drop_vision_last_layer": False, "rope_theta": 10_000.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        }  # fmt: skip
        images |= {
            "image_processor_type": "MiniCPMVImageProcessor", "image_feature_size": QUERIES, "version": float(version),
            "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
            "unk": "<unk>", "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5],
        }  # fmt: skip
    for file, content in (("config", whole), ("preprocessor_config", images)):
        (folder / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    of_text = "{% for message in messages %}<|im_start|>{{message['role'] + '\n' + message['content']}}<|im_end|>\n"
    of_text += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = PARTS_TEMPLATE.replace("<image>", "<|image_pad|>") if is_new else of_text
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special).save_pretrained(folder)
    return model


def parts_of(pixels: NDArray[np.float32], version: str, sizes: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]]:
    """The parts of an image, each float32 [3, height, width], of `Tiles.pixels`. sizes: rows and columns of patches."""
    parts = []
    for rows, columns in sizes:
        of_part, pixels = pixels[: rows * columns], pixels[rows * columns :]
        ids = torch.arange(rows * columns)[None, :, None]
        if version == "4.6":  # token by token
            ids = _in_fours(_in_fours(ids, rows, columns).reshape(1, -1, 4), rows // 2, columns // 2)
        natural = np.empty_like(of_part)
        natural[ids.flatten().numpy()] = of_part
        apart = natural.reshape(rows, columns, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4)
        parts.append(np.ascontiguousarray(apart.reshape(3, rows * PATCH, columns * PATCH)))
    assert not len(pixels)
    return parts


# What `MiniCPMVImageProcessor` of MiniCPM-V 2.6, and `MiniCPMV4_6ImageProcessorPil` and `MiniCPMV4_6Processor` of
# Transformers 5.24, make of `noise` by height and width: rows and columns of the patches of each part, the CRC of the
# pixels, and the text, with brackets for the tokens around slices and the number of tokens for each run.
RECORDED: dict[tuple[int, int], list[tuple[list[tuple[int, int]], int, str]]] = {
    (40, 31): [
        ([(9, 7), *[(6, 10)] * 2], 2_247_508_496, "<image>6</image>[6]\n[6]"),
        ([(8, 8), *[(8, 8)] * 2], 628_191_262, "<image>4</image>[4]\n[4]"),
    ],
    (20, 75): [
        ([(4, 15), *[(7, 9)] * 3], 1_626_945_443, "<image>6</image>[6][6][6]"),
        ([(4, 16), *[(8, 8)] * 3], 3_408_683_912, "<image>4</image>[4][4][4]"),
    ],
    (8, 8): [
        ([(8, 8)], 1_541_035_333, "<image>6</image>"),
        ([(8, 8)], 1_541_035_333, "<image>4</image>"),
    ],
    (90, 120): [
        ([(7, 9), *[(7, 9)] * 4], 1_283_957_139, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 3_930_945_721, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (64, 17): [
        ([(16, 4), *[(9, 7)] * 3], 2_590_493_282, "<image>6</image>[6]\n[6]\n[6]"),
        ([(16, 4), *[(8, 8)] * 3], 2_857_355_845, "<image>4</image>[4]\n[4]\n[4]"),
    ],
    (200, 20): [
        ([(25, 2), *[(12, 5)] * 4], 2_700_514_027, "<image>6</image>[6]\n[6]\n[6]\n[6]"),
        ([(24, 4), *[(12, 4)] * 4], 3_142_651_294, "<image>6</image>[3]\n[3]\n[3]\n[3]"),
    ],
    (33, 33): [
        ([(8, 8), *[(6, 11)] * 2], 1_010_828_617, "<image>6</image>[6]\n[6]"),
        ([(8, 8), *[(4, 12)] * 2], 4_147_258_323, "<image>4</image>[3]\n[3]"),
    ],
    (32, 32): [
        ([(8, 8)], 316_006_065, "<image>6</image>"),
        ([(8, 8)], 316_006_065, "<image>4</image>"),
    ],
    (45, 46): [
        ([(8, 8), *[(8, 8)] * 4], 47_411_390, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 47_411_390, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (64, 64): [
        ([(8, 8), *[(8, 8)] * 4], 1_481_834_102, "<image>6</image>[6][6]\n[6][6]"),
        ([(8, 8), *[(8, 8)] * 4], 1_481_834_102, "<image>4</image>[4][4]\n[4][4]"),
    ],
    (100, 31): [
        ([(14, 4), *[(8, 8)] * 3], 2_253_613_260, "<image>6</image>[6]\n[6]\n[6]"),
        ([(16, 4), *[(8, 8)] * 3], 212_367_876, "<image>4</image>[4]\n[4]\n[4]"),
    ],
    (31, 100): [
        ([(4, 14), *[(8, 8)] * 3], 3_001_609_690, "<image>6</image>[6][6][6]"),
        ([(4, 12), *[(8, 8)] * 3], 795_711_992, "<image>3</image>[4][4][4]"),
    ],
}  # fmt: skip
