"""Tiny random T5 and Whisper checkpoints, as transformers saves them, with real tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny import TEXT, train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

T5_SHAPE: dict[str, Any] = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "n_positions": 512, "tie_word_embeddings": False, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WHISPER_SHAPE: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 80,
    "max_target_positions": 448,
}  # fmt: skip
LANGUAGES = ("en", "de", "ja")
NUM_TIMESTAMPS = 1501  # 0.00 to 30.00 s


def _scatter(model: Any) -> None:
    """Weights that are large enough for texts that do not repeat one token."""
    import torch

    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)


def write_t5(folder: Path, seed: int = 0, change: Callable[[Any], None] | None = None, **changes: Any) -> None:
    """A T5 checkpoint with a SentencePiece-like unigram tokenizer. change: is given the model before it is saved."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = sorted({f"\u2581{word}" for word in " ".join(TEXT).split()})  # not trained: training is not repeatable
    letters = sorted({letter for word in words for letter in word})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -5.0) for word in words if len(word) > 2] + [(letter, -8.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    size = tokenizer.get_vocab_size()  # not padded: Transformers would generate tokens that do not exist
    model = T5ForConditionalGeneration(T5Config(vocab_size=size, **(T5_SHAPE | changes))).eval()
    _scatter(model)
    if change is not None:
        change(model)
    model.save_pretrained(folder)


def shake_decoder(model: Any) -> None:
    """Change a model's decoder a little: the result often agrees with the model. The encoder stays as it is."""
    import torch

    torch.manual_seed(99)
    for parameter in model.get_decoder().block.parameters() if hasattr(model, "shared") else _layers(model):
        parameter.data += 0.01 * torch.randn_like(parameter)


def _layers(model: Any) -> Any:
    return model.model.decoder.layers.parameters()


def cut_decoder(model: Any) -> None:
    """Leave the first layer of a T5 model's decoder only. The encoder stays as it is."""
    model.decoder.block = model.decoder.block[:1]
    model.config.num_decoder_layers = 1


def write_whisper(folder: Path, seed: int = 0, change: Callable[[Any], None] | None = None, **changes: Any) -> None:
    """A Whisper checkpoint of three languages, with its special tokens and timestamps."""
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    names = [f"<|{language}|>" for language in LANGUAGES]
    special = ["<|endoftext|>", "<|startoftranscript|>", *names, "<|translate|>", "<|transcribe|>"]
    tokenizer = train_tokenizer(special=[*special, "<|notimestamps|>"])
    tokenizer.add_tokens([f"<|{0.02 * i:.2f}|>" for i in range(NUM_TIMESTAMPS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict.fromkeys(("eos_token", "pad_token"), special[0]))
    fast.save_pretrained(folder)
    ids = {name: tokenizer.token_to_id(name) for name in [*special, "<|notimestamps|>"]}
    torch.manual_seed(seed)
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    shape = WHISPER_SHAPE | changes
    tokens = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    size = tokenizer.get_vocab_size()  # not padded: Transformers would generate timestamps that do not exist
    config = WhisperConfig(vocab_size=size, suppress_tokens=None, begin_suppress_tokens=None, **tokens, **shape)
    model = WhisperForConditionalGeneration(config).eval()
    _scatter(model)
    model.generation_config = GenerationConfig(
        **tokens,
        is_multilingual=True,
        lang_to_id={name: ids[name] for name in names},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        suppress_tokens=[1, 2, 7, start, *(ids[name] for name in names)],
        begin_suppress_tokens=[220, end],
        max_initial_timestamp_index=50,
        max_length=shape["max_target_positions"],
        return_timestamps=False,
    )
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=shape["num_mel_bins"]).save_pretrained(folder)


def tone(seconds: float, seed: int = 0, rate: int = 16_000) -> NDArray[np.float32]:
    """Audio that is not silent: a few sliding tones with noise, float32 [n] at 16 kHz."""
    import numpy as np

    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    waves = [np.sin(2 * np.pi * (pitch + 30 * at) * at) for pitch in rng.uniform(100, 3000, size=4)]
    samples: NDArray[np.float32] = (0.2 * np.sum(waves, axis=0) + 0.02 * rng.normal(size=len(at))).clip(-1, 1)
    return samples.astype(np.float32)
