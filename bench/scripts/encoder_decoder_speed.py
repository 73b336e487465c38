"""Measures the speed-up of an encoder-decoder pair that was trained for minutes, with `outrider bench`.

    PYTHONPATH=tests/helpers python bench/scripts/encoder_decoder_speed.py FOLDER [MINUTES]

The task needs no download: to restore capitals and punctuation. The texts are paragraphs from docstrings of the
packages that are installed; every 40th is never trained on, and of those the benchmark's prompts are made. The main
model is a MarianMT with 6 decoder layers of 512, as OPUS-MT has them; the draft model has its encoder and one decoder
layer, which learns the main model's distributions. A word with its punctuation is one token, and attention begins as
what copies the word at the same place: what takes hours to learn otherwise is not what is measured. FOLDER gets the
checkpoints, the bundle and the prompts, and what is there is not made again. For an idle machine, so it is run by hand.
"""

import ast
import copy
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, kl_div, pad
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from encoder_decoders import sentencepiece_model
from outrider.cli import run
from outrider_distill.train.fit import find_device
from outrider_export.tokenizers.marian_tokenizer import tokenizer_of

SHAPE: dict[str, Any] = {
    "d_model": 512, "encoder_layers": 3, "decoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "max_position_embeddings": 512,
    "activation_function": "swish", "scale_embedding": True, "dropout": 0.0,
}  # fmt: skip
NUM_WORDS, IGNORED = 16_000, -100
LENGTHS = range(80, 400)  # characters of a paragraph
BATCH_TOKENS, RATE, WARM_UP = 1024, 5e-4, 50
DRAFT_SHARE = 0.25  # of the minutes
NUM_PROMPTS, HELD_OUT = 24, 40
MODES = "plain,auto,suffix,draft:2,draft:4,draft:6"


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
    """Two checkpoints, and prompts that they were not trained on. Texts of which each word is a token are taken."""
    texts = sorted(set(paragraphs()), key=lambda text: hashlib.sha256(text.encode()).digest())
    vocabulary = write_tokenizer(texts, folder / "main")
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_of(folder / "main")))
    pairs = [(plain(text), text, *encode(tokenizer, [plain(text), text])) for text in texts]
    lengths = [(len(a.split()), len(b.split()), len(c) - 1, len(d) - 1) for a, b, c, d in pairs]
    pairs = [each for each, found in zip(pairs, lengths, strict=True) if len({*found}) == 1]
    trained = [each for i, each in enumerate(pairs) if i % HELD_OUT]
    lines = [json.dumps({"prompt": each[0]}) for each in pairs[::HELD_OUT][:NUM_PROMPTS]]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sources, targets = [each[2] for each in trained], [each[3] for each in trained]
    print(f"{len(trained):,} paragraphs, {sum(map(len, targets)):,} tokens to learn from")

    torch.manual_seed(0)
    pad_id = vocabulary["<pad>"]
    special = {"pad_token_id": pad_id, "decoder_start_token_id": pad_id, "eos_token_id": 0, "forced_eos_token_id": 0}
    big = MarianMTModel(MarianConfig(vocab_size=len(vocabulary), **special, **SHAPE))
    begin_as_copier(big)
    big.generation_config = GenerationConfig(**special, bad_words_ids=[[pad_id]], max_length=512)
    big.final_logits_bias[0, pad_id] = -1e4

    def data() -> Iterator[dict[str, torch.Tensor]]:
        return batches(sources, targets, pad_id)

    fit(big, data(), (1 - DRAFT_SHARE) * seconds, lambda out, _, labels: answer_loss(out, labels))
    small = copy.deepcopy(big)
    small.model.decoder.layers = small.model.decoder.layers[:1]
    small.config.decoder_layers = 1
    small.model.encoder.requires_grad_(False)
    small.model.shared.requires_grad_(False)
    big.eval().requires_grad_(False)
    fit(small, data(), DRAFT_SHARE * seconds, lambda out, inputs, labels: distance(out, big(**inputs), labels))
    write_tokenizer(texts, folder / "draft")
    for name, model in (("main", big), ("draft", small)):
        model.save_pretrained(folder / name)


def paragraphs() -> Iterator[str]:
    """Paragraphs of plain English in the docstrings of the standard library, of NumPy and of PyTorch."""
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
                    if len(text) in LENGTHS and re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'()\-.?]+[.]", text):
                        yield text


def plain(text: str) -> str:
    """A text as it is asked: without capitals and punctuation."""
    words = (re.sub(r"[^a-z0-9]", "", word) for word in text.lower().split())
    return " ".join(word for word in words if word)


def write_tokenizer(texts: list[str], folder: Path) -> dict[str, int]:
    """MarianMT's files: frequent words with their punctuation, and letters. Returns the ids."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = Counter(f"\u2581{word}" for text in texts for each in (text, plain(text)) for word in each.split())
    words = [word for word, _ in counts.most_common(NUM_WORDS)]
    letters = sorted({letter for word in counts for letter in word})
    pieces = dict.fromkeys(letters, -12.0) | {word: -5.0 for word in words if len(word) > 1}
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(sentencepiece_model(pieces))
    ids = {token: i for i, token in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return ids


def begin_as_copier(model: Any) -> None:
    """Have each decoder layer attend to the place where it is, and add the word that it finds there."""
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                getattr(layer.encoder_attn, part).weight.add_(torch.eye(SHAPE["d_model"]))


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[torch.Tensor]:
    """Token ids of each text, int64 [n]."""
    return [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts)]


def batches(sources: list[torch.Tensor], targets: list[torch.Tensor], pad_id: int) -> Iterator[dict[str, torch.Tensor]]:
    """Pairs of similar lengths, about `BATCH_TOKENS` tokens of answers, for ever."""
    generator = np.random.default_rng(0)
    order = sorted(range(len(targets)), key=lambda i: len(targets[i]))
    size = max(BATCH_TOKENS * len(targets) // sum(map(len, targets)), 1)
    while True:
        begin = int(generator.integers(max(len(order) - size, 1)))
        chosen = order[begin : begin + size]
        asked = [sources[i] for i in chosen]
        inputs = torch.nn.utils.rnn.pad_sequence(asked, batch_first=True, padding_value=pad_id)
        labels = torch.nn.utils.rnn.pad_sequence([targets[i] for i in chosen], batch_first=True, padding_value=IGNORED)
        before = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad_id)
        yield {
            "input_ids": inputs,
            "attention_mask": (inputs != pad_id).long(),
            "decoder_input_ids": pad(before, (1, 0), value=pad_id),
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
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.3f}, {done:.0%}", flush=True)
        step += 1
    print(f"{step} steps, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
