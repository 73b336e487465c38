"""Measures the speed-up of an encoder-decoder pair that was trained for minutes, with `outrider bench`.

    python tests/encoder_decoder_speed.py FOLDER [MINUTES]

The task is one that needs no download: to restore capitals and punctuation. The texts are paragraphs from docstrings of
the packages that are installed; every 40th is never trained on, and of those the benchmark's prompts are made. The main
model is a T5 with 4 and 6 layers of 384; the draft model has its encoder and one decoder layer, which learns the main
model's distributions. FOLDER gets the checkpoints, the bundle and the prompts, and what is there is not made again. For
an idle machine, so it is run by hand.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy, kl_div, pad
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from outrider.cli import run
from outrider_export.train.fit import find_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPE: dict[str, Any] = {
    "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_decoder_layers": 6, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "tie_word_embeddings": False,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
VOCAB, IGNORED = 4096, -100
LENGTHS = range(80, 400)  # characters of a paragraph
BATCH_TOKENS, RATE, WARM_UP = 2048, 1e-3, 100
DRAFT_SHARE = 0.25  # of the minutes
NUM_PROMPTS, HELD_OUT = 24, 40
MODES = "plain,auto,suffix,draft:2,draft:4"


def main() -> None:
    """Train, export and measure."""
    folder, minutes = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 12.0
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "bundle").exists():
        train_pair(folder, minutes * 60)
        options = ["--weights", "int8", "--draft-weights", "int8"]
        run(["export", str(folder / "main"), "--draft", str(folder / "draft"), *options, "-o", str(folder / "bundle")])
    asked = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "128", "--repeats", "2"]
    sys.exit(run(["bench", str(folder / "bundle"), *asked, "--modes", MODES]))


def train_pair(folder: Path, seconds: float) -> None:
    """Two checkpoints, and prompts that they were not trained on."""
    texts = sorted(set(paragraphs()), key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out, trained = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT]
    print(f"{len(trained):,} paragraphs to learn from")
    lines = [json.dumps({"prompt": plain(text)}) for text in held_out[:NUM_PROMPTS]]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = make_tokenizer(trained)
    sources, targets = (encode(tokenizer, each) for each in (map(plain, trained), trained))

    torch.manual_seed(0)
    big = T5ForConditionalGeneration(T5Config(vocab_size=tokenizer.get_vocab_size(), **SHAPE))
    fit(big, batches(sources, targets), (1 - DRAFT_SHARE) * seconds, lambda out, _, labels: answer_loss(out, labels))
    small = copy.deepcopy(big)
    small.decoder.block = small.decoder.block[:1]
    small.config.num_decoder_layers = 1
    small.encoder.requires_grad_(False)
    small.shared.requires_grad_(False)
    big.eval().requires_grad_(False)
    fit(
        small,
        batches(sources, targets),
        DRAFT_SHARE * seconds,
        lambda out, inputs, labels: distance(out, big(**inputs), labels),
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)
    for name, model in (("main", big), ("draft", small)):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)


def paragraphs() -> Iterator[str]:
    """Paragraphs of plain English in the docstrings of the standard library and of NumPy."""
    for root in (Path(ast.__file__).parent, Path(np.__file__).parent, Path(torch.__file__).parent):
        for path in sorted(root.glob("**/*.py")):
            if "site-packages" in path.relative_to(root).parts:
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
                continue
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
            for node in (each for each in ast.walk(tree) if isinstance(each, documented)):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    text = " ".join(paragraph.split())
                    if len(text) in LENGTHS and re.fullmatch(
                        r"[A-Z][A-Za-z0-9 ,;:'()\-]+[a-z][.]( ?[A-Za-z0-9 ,;:'()\-.?]+[.])*", text
                    ):
                        yield text


def plain(text: str) -> str:
    """A text as it is asked: without capitals and punctuation."""
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", text.lower()).split())


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """A unigram tokenizer as T5 has one."""
    tokenizer = Tokenizer(models.Unigram())
    spaces = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB, special_tokens=special, unk_token=special[2], show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *map(plain, texts)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterator[str] | list[str]) -> list[torch.Tensor]:
    """Token ids of each text, int64 [n]."""
    return [torch.tensor(each.ids) for each in tokenizer.encode_batch(list(texts))]


def batches(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Pairs of similar lengths, about `BATCH_TOKENS` tokens of answers, for ever."""
    generator = np.random.default_rng(0)
    order = sorted(range(len(targets)), key=lambda i: len(targets[i]))
    size = max(BATCH_TOKENS * len(targets) // sum(map(len, targets)), 1)
    while True:
        begin = int(generator.integers(max(len(order) - size, 1)))
        chosen = order[begin : begin + size]
        asked = torch.nn.utils.rnn.pad_sequence([sources[i] for i in chosen], batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence([targets[i] for i in chosen], batch_first=True, padding_value=IGNORED)
        yield {
            "input_ids": asked,
            "attention_mask": (asked != 0).long(),
            "decoder_input_ids": pad(labels[:, :-1].clamp_min(0), (1, 0)),
            "labels": labels,
        }


def answer_loss(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the texts."""
    return cross_entropy(out.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def distance(out: Any, wanted: Any, labels: torch.Tensor) -> torch.Tensor:
    """KL divergence from the main model's distributions."""
    ours, theirs = (each.logits.float()[labels != IGNORED].log_softmax(-1) for each in (out, wanted))
    return kl_div(ours, theirs, log_target=True, reduction="batchmean")


def fit(
    model: Any,
    data: Iterator[dict[str, torch.Tensor]],
    seconds: float,
    loss_of: Callable[[Any, dict[str, torch.Tensor], torch.Tensor], torch.Tensor],
) -> None:
    """Train a model for so long; the rate falls to zero."""
    _, half = find_device()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0)
    began, step = time.monotonic(), 0
    while (done := (time.monotonic() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 - done)
        inputs = next(data)
        labels = inputs.pop("labels")
        with half():
            loss = loss_of(model(**inputs), inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}, loss {loss.item():.3f}, {done:.0%}", flush=True)
        step += 1
    print(f"{step} steps, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
