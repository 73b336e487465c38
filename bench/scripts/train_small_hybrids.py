"""Trains small models with states on text that another model writes. Random weights hide faults that these show.

    python samples/make_prompts.py prompts.txt
    python bench/scripts/train_small_hybrids.py FOLDER WRITER TOKENIZER prompts.txt [KIND …]

States of random weights forget at once, so a wrong one shows in few texts. These models have learnt to remember: each
text begins with codes, and ends with questions about them. WRITER is a checkpoint or GGUF file of a small model with
ChatML's template, and TOKENIZER the folder with its tokenizer. FOLDER gets `texts.safetensors`, which is used again,
and a checkpoint of each kind, of about 20 million weights: short convolutions, gated delta nets with an MTP module, and
Mamba-2. A GPU needs minutes. Needs PyTorch and Transformers. `bench/scripts/small_hybrids.py` looks at what they do.
"""

import itertools
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch.nn import functional

LENGTH, ANSWER = 2048, 640  # tokens of a text, and of an answer in it
NUM_ANSWERS, AT_ONCE = int(os.environ.get("NUM_ANSWERS", "10240")), int(os.environ.get("AT_ONCE", "2048"))
SECONDS = float(os.environ.get("SECONDS", "240"))  # of training of each kind
BATCH = int(os.environ.get("BATCH", "32"))
RATE, WARM_UP = 2e-3, 0.05
PLACES = ["Oslo", "Lima", "Cairo", "Quito", "Accra", "Delhi", "Seoul", "Paris", "Turin", "Dakar", "Perth", "Kyoto"]
_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49_152}
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": _SIZES | {
        "num_hidden_layers": 9, "intermediate_size": 768, "block_ff_dim": 768, "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention"] * 3, "tie_embedding": True,
    },
    "qwen3_5_text": _SIZES | {
        "num_hidden_layers": 8, "intermediate_size": 768, "head_dim": 64, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [4, 2, 2],
        },
    },
    "granitemoehybrid": _SIZES | {
        "num_hidden_layers": 8, "shared_intermediate_size": 768, "intermediate_size": 768, "num_local_experts": 0,
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "attention_multiplier": 0.125, "position_embedding_type": None, "tie_word_embeddings": True,
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
    },
}  # fmt: skip


def write_texts(writer: str, tokenizer: Any, prompts: list[str], device: torch.device) -> torch.Tensor:
    """Conversations of the writer's own answers, int64 [n, LENGTH]."""
    path = Path(writer)
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if source else path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **source).to(device).eval()
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    turns, chosen = list[list[int]](), random.Random(0)
    for _ in range(0, NUM_ANSWERS, AT_ONCE):
        asked = [_turn(each) for each in chosen.choices(prompts, k=AT_ONCE)]
        read = tokenizer(asked, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        began = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                **read.to(device), do_sample=True, temperature=0.9, top_k=0, max_new_tokens=ANSWER,
                eos_token_id=ends, pad_token_id=ends[1],
            )  # fmt: skip
        for question, answer in zip(asked, made[:, read["input_ids"].shape[1] :].tolist(), strict=True):
            kept = list(itertools.takewhile(lambda token_id: token_id not in ends, answer))
            turns.append(
                tokenizer.encode(question, add_special_tokens=False) + kept + _encode(tokenizer, "<|im_end|>\n")
            )
        print(f"{len(turns)} answers, {time.perf_counter() - began:.0f} s", flush=True)
    return torch.tensor(list(_texts(turns, tokenizer)))


def _turn(question: str, answer: str = "") -> str:
    ended = f"{answer}<|im_end|>\n" if answer else ""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{ended}"


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _texts(turns: list[list[int]], tokenizer: Any) -> Iterator[list[int]]:
    """Each has three codes at its beginning, questions about them at its end, and as many turns between as fit."""
    order, chosen = random.Random(1), random.Random(2)
    shuffled = itertools.cycle(order.sample(turns, len(turns)))
    for _ in range(2 * sum(map(len, turns)) // LENGTH):
        codes = {place: f"{chosen.randrange(10_000):04}" for place in chosen.sample(PLACES, 3)}
        begin, end = (list[int](), list[int]())
        for place, code in codes.items():
            begin += _encode(tokenizer, _turn(f"The code of {place} is {code}.", "I will remember it."))
        for place in chosen.sample(sorted(codes), 3):
            end += _encode(tokenizer, _turn(f"What is the code of {place}?", f"The code of {place} is {codes[place]}."))
        room = chosen.randrange(LENGTH // 8, LENGTH) - len(begin) - len(end)  # far and near
        middle = list[int]()
        while len(middle) < room:
            middle += next(shuffled)
        text = begin + middle[: max(room, 0)] + _encode(tokenizer, "<|im_end|>\n") + end
        while len(text) < LENGTH:
            text += next(shuffled)
        yield text[:LENGTH]


class Module(torch.nn.Module):  # type: ignore[misc]
    """The MTP module of Qwen3.5: a layer with attention that reads the last hidden state and the next token.

    Source: Qwen3-Next's checkpoints, as vLLM's `qwen3_next_mtp.py` reads them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        one = type(config)(**config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
        one._attn_implementation = "sdpa"
        norms = (qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([qwen.Qwen3_5DecoderLayer(one, 0)])
        self.rotary = qwen.Qwen3_5TextRotaryEmbedding(one)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, h] of a module that reads token i + 1 beside the hidden state of token i."""
        rows = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1))
        positions = torch.arange(rows.shape[1], device=rows.device)[None]  # of text alone: three alike
        turned = self.rotary(rows, positions.expand(3, 1, -1))
        out = self.layers[0](rows, position_embeddings=turned, attention_mask=None, position_ids=positions)
        return self.norm(out[0] if isinstance(out, tuple) else out)


def loss_of(hidden: torch.Tensor, matrix: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, eight texts at a time, whose logits are computed again for the gradient."""

    def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy((rows @ matrix.T).flatten(0, 1).float(), wanted.flatten(), reduction="sum")

    parts = zip(hidden.split(8), labels.split(8), strict=True)
    return sum(torch.utils.checkpoint.checkpoint(part, *each, use_reentrant=False) for each in parts) / labels.numel()


def train(kind: str, texts: torch.Tensor, device: torch.device, seconds: float) -> tuple[Any, Module | None]:
    """Train a model of a kind, and its module, for so many seconds."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **KINDS[kind], max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).train()
    module = Module(config).to(device).train() if kind == "qwen3_5_text" else None
    weights = [*model.parameters(), *(module.parameters() if module else ())]
    print(f"{kind}: {sum(each.numel() for each in weights):,} weights", flush=True)
    groups = [
        {"params": [w for w in weights if (w.ndim > 1) is wide], "weight_decay": 0.1 * wide} for wide in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=device.type == "cuda")
    order, began, step = torch.Generator().manual_seed(0), time.perf_counter(), 0
    held_out, texts = texts[:BATCH].to(device), texts[BATCH:]
    while (done := (time.perf_counter() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(done / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
        batch = texts[torch.randint(len(texts), (BATCH,), generator=order)].to(device)
        losses = losses_of(model, module, batch)
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(
                f"{kind} {step} {time.perf_counter() - began:.0f} s",
                *(f"{loss.item():.3f}" for loss in losses),
                flush=True,
            )
        step += 1
    with torch.no_grad():
        print(
            f"{kind}, {step} steps, held out:", *(f"{loss.item():.3f}" for loss in losses_of(model, module, held_out))
        )
    return model.eval(), module


def losses_of(model: Any, module: Module | None, batch: torch.Tensor) -> list[torch.Tensor]:
    """Of the model, and of its module, which is trained on two steps of its own."""
    inner, matrix = model.model, model.get_output_embeddings().weight
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.device.type == "cuda"):
        hidden = inner(input_ids=batch, use_cache=False).last_hidden_state
        scale = 1 / getattr(model.config, "logits_scaling", 1.0)
        losses = [loss_of(hidden[:, :-1] * scale, matrix, batch[:, 1:])]
        if module:
            state = hidden
            for k in (1, 2):  # what reads token i + k gives token i + k + 1
                state = module(inner.embed_tokens(batch[:, k:]), state[:, : batch.shape[1] - k])
                losses.append(0.3 * loss_of(state[:, :-1], matrix.detach(), batch[:, k + 1 :]))
    return losses


def save(folder: Path, model: Any, module: Module | None, tokenizer: Path) -> None:
    """Write a checkpoint in bf16, as published ones are."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    if module:
        path = folder / "model.safetensors"
        own = {f"mtp.{name}": each.to("cpu", torch.bfloat16).contiguous() for name, each in module.state_dict().items()}
        tensors = safetensors.torch.load_file(path) | {name: each for name, each in own.items() if "rotary" not in name}
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def main(folder: str, writer: str, tokenizer: str, prompts: str, *kinds: str) -> None:
    """Write the texts, and train."""
    out, device = Path(folder), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    if not (texts := out / "texts.safetensors").exists():
        reader = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(Path(tokenizer, "tokenizer.json")),
            pad_token="<|endoftext|>",  # noqa: S106
        )
        made = write_texts(writer, reader, Path(prompts).read_text(encoding="utf-8").splitlines(), device)
        safetensors.torch.save_file({"texts": made.to(torch.uint16)}, texts)
    read = safetensors.torch.load_file(texts)["texts"].long()
    print(f"{read.numel():,} tokens", flush=True)
    for kind in kinds or KINDS:
        save(out / kind, *train(kind, read, device, SECONDS), Path(tokenizer))


if __name__ == "__main__":
    if len(sys.argv) < 5:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
