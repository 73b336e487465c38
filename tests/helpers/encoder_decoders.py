"""Tiny random T5, Whisper and MarianMT checkpoints, in the form that the hub's have, with real tokenizers."""

import json
import struct
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from published import publish_marian, publish_t5, publish_whisper
from tiny import TEXT, train_tokenizer

T5_SHAPE: dict[str, Any] = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "n_positions": 512, "tie_word_embeddings": False, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WHISPER_SHAPE: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 80,
    "max_target_positions": 448,
}  # fmt: skip
MARIAN_SHAPE: dict[str, Any] = {  # that of OPUS-MT, but for the sizes
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 256,
    "activation_function": "swish", "scale_embedding": True,
}  # fmt: skip
LANGUAGES = ("en", "de", "ja")
NUM_TIMESTAMPS = 1501  # 0.00 to 30.00 s


def _scatter(model: Any) -> None:
    """Weights that are large enough for texts that do not repeat one token."""
    import torch

    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)


def unigram_pieces(texts: Iterable[str]) -> dict[str, float]:
    """Words and letters with their scores. They are not trained: training is not repeatable."""
    words = sorted({f"\u2581{word}" for word in " ".join(texts).split()})
    letters = sorted({letter for word in words for letter in word})
    return {word: -5.0 for word in words if len(word) > 2} | dict.fromkeys(letters, -8.0)


def write_t5(folder: Path, seed: int = 0, change: Callable[[Any], None] | None = None, **changes: Any) -> None:
    """A T5 checkpoint with a SentencePiece-like unigram tokenizer. change: is given the model before it is saved."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0} | unigram_pieces(TEXT)
    extra = [f"<extra_id_{i}>" for i in reversed(range(100))]
    pieces |= dict.fromkeys(extra, 0.0)
    tokenizer = Tokenizer(models.Unigram([*pieces.items()], unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer.add_special_tokens(extra)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    size = tokenizer.get_vocab_size()  # not padded: Transformers would generate tokens that do not exist
    model = T5ForConditionalGeneration(T5Config(vocab_size=size, **(T5_SHAPE | changes))).eval()
    _scatter(model)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    publish_t5(folder)


def shake_decoder(model: Any) -> None:
    """Change a model's decoder a little: the result often agrees with the model. The encoder stays as it is."""
    import torch

    torch.manual_seed(99)
    for parameter in model.get_decoder().block.parameters() if hasattr(model, "shared") else _layers(model):
        parameter.data += 0.01 * torch.randn_like(parameter)


def _layers(model: Any) -> Any:
    return model.model.decoder.layers.parameters()


def cut_decoder(model: Any) -> None:
    """Leave the first layer of a model's decoder only. The encoder stays as it is."""
    if hasattr(model, "shared"):
        model.decoder.block = model.decoder.block[:1]
        model.config.num_decoder_layers = 1
    else:
        model.model.decoder.layers = model.model.decoder.layers[:1]
        model.config.decoder_layers = 1


def shake_encoder(model: Any) -> None:
    """Change a Whisper's encoder a little, so that it is another one with much the same states."""
    import torch

    torch.manual_seed(99)
    for parameter in model.model.encoder.layers.parameters():
        parameter.data += 0.001 * torch.randn_like(parameter)


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
    special += ["<|startoflm|>", "<|startofprev|>", "<|nocaptions|>"]
    tokenizer = train_tokenizer(special=[*special, "<|notimestamps|>"], user_defined=())
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
        suppress_tokens=[1, 2, 7, start, *(ids[name] for name in special[2 + len(names) :])],
        begin_suppress_tokens=[220, end],
        max_initial_timestamp_index=50,
        max_length=shape["max_target_positions"],
        return_timestamps=False,
    )
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=shape["num_mel_bins"]).save_pretrained(folder)
    publish_whisper(folder)


def write_marian(folder: Path, seed: int = 9, change: Callable[[Any], None] | None = None, **changes: Any) -> None:
    """A MarianMT checkpoint with SentencePiece's files, from English to German. It would always generate padding."""
    import torch
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    folder.mkdir(parents=True)
    source, target = unigram_pieces(TEXT[:2]), unigram_pieces(TEXT[2:3])
    (folder / "source.spm").write_bytes(sentencepiece_model(source))
    (folder / "target.spm").write_bytes(sentencepiece_model(target))
    tokens = [*dict.fromkeys(["</s>", "<unk>", ">>deu<<", *target, *source, "<pad>"])]
    ids = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    torch.manual_seed(seed)
    pad = ids["<pad>"]
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    model = MarianMTModel(MarianConfig(vocab_size=len(ids), **special, **(MARIAN_SHAPE | changes))).eval()
    _scatter(model)
    _vary(model.model.decoder.layers)
    model.final_logits_bias.normal_()
    model.final_logits_bias[0, 0] = -10.0  # so that texts are long
    model.final_logits_bias[0, pad] = 1000.0
    model.generation_config = GenerationConfig(**special, bad_words_ids=[[pad]], num_beams=4, max_length=256)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    publish_marian(folder)


def _vary(layers: Any) -> None:
    """Have tokens followed by others than themselves: input and output share one matrix, so states are rotated.

    The last layer's feed-forward network becomes a random matrix, as swish(x) - swish(-x) = x.
    """
    import torch

    for layer in layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            attention.out_proj.weight.data *= 0.15
    last, size = layers[-1], layers[-1].embed_dim
    matrix = torch.randn(size, size)
    last.fc1.weight.data = torch.cat([torch.eye(size), -torch.eye(size)])
    last.fc2.weight.data = torch.cat([matrix, -matrix], dim=1)
    last.final_layer_norm.weight.data *= 3


def sentencepiece_model(pieces: dict[str, float], model_type: int = 1, piece_type: int = 1) -> bytes:
    """A SentencePiece model that does not normalise characters, in protobuf's format. pieces: their scores."""
    control = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    every = [*control, *((piece, score, piece_type) for piece, score in pieces.items())]
    made = [_field(1, _field(1, piece.encode()) + _field(2, score) + _field(3, kind)) for piece, score, kind in every]
    return b"".join(made) + _field(2, _field(3, model_type)) + _field(3, _field(1, b"identity"))


def _field(number: int, value: float | bytes) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3]) + _varint(value)
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def tone(seconds: float, seed: int = 0, rate: int = 16_000) -> NDArray[np.float32]:
    """Audio that is not silent: a few sliding tones with noise, float32 [n] at 16 kHz."""
    import numpy as np

    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    waves = [np.sin(2 * np.pi * (pitch + 30 * at) * at) for pitch in rng.uniform(100, 3000, size=4)]
    samples: NDArray[np.float32] = (0.2 * np.sum(waves, axis=0) + 0.02 * rng.normal(size=len(at))).clip(-1, 1)
    return samples.astype(np.float32)


def write_wav(path: Path, frames: bytes, width: int = 2, channels: int = 1, rate: int = 16_000) -> None:
    """A WAV file. width: bytes of a sample."""
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", "NONE"))
        file.writeframes(frames)
