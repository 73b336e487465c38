"""What a checkpoint of an encoder-decoder model says of itself: its shape, its encoder, and how its texts begin."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.bundle.manifest import AudioEntry, EncoderEntry, Geometry
from outrider.errors import ExportError
from outrider_export.sources.safetensors import tensors_of
from outrider_export.sources.source import architectures_of, read_json
from outrider_export.tokenizers.vocabulary import Vocabulary

ENCODER_FOLDER = "encoder"
KINDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_NUM_TIMESTAMPS = 1501  # <|0.00|> to <|30.00|>
_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
_T5_LENGTH = 512  # tokens that T5 was trained with; newer configurations leave n_positions out


def kind_of_encoder_decoder(config: dict[str, Any]) -> str | None:
    """ "t5", "whisper" or "marian"; None for another kind of model."""
    return next((kind for kind, each in KINDS.items() if each["architecture"] in architectures_of(config)), None)


def geometry_of(config: dict[str, Any], where: Path) -> Geometry:
    """The decoder's shape, from a checkpoint's `config.json`.

    Raises:
        ExportError: naming the key that is missing.
    """
    is_t5 = kind_of_encoder_decoder(config) == "t5"
    try:
        heads = config["num_heads" if is_t5 else "decoder_attention_heads"]
        layers = config.get("num_decoder_layers") or config["num_layers"] if is_t5 else config["decoder_layers"]
        return Geometry(
            architecture=config["model_type"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config["d_kv"] if is_t5 else config["d_model"] // heads,
            hidden_size=config["d_model"],
            context_length=_length(config, "max_target_positions"),
            logits_width=config["vocab_size"],
        )
    except KeyError as error:
        raise ExportError(f"{where}/config.json has no {error}, so its model's shape is not known.") from error


def _length(config: dict[str, Any], key: str) -> int:
    """The most positions of the encoder or the decoder. key: where Whisper's configuration has it."""
    kind = kind_of_encoder_decoder(config)
    if kind == "t5":
        return int(config.get("n_positions") or _T5_LENGTH)
    return int(config["max_position_embeddings" if kind == "marian" else key])


def vocabulary_of(folder: Path, config: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a checkpoint. Timestamps are added where an older Whisper's tokenizer lacks them.

    Raises:
        ExportError: as `Vocabulary.of_folder`.
    """
    found = Vocabulary.of_folder(folder)
    if kind_of_encoder_decoder(config) != "whisper" or not len(found) or found.tokens[-1] != "<|notimestamps|>":
        return found
    count = min(_NUM_TIMESTAMPS, int(config.get("vocab_size") or 0) - len(found))
    added = range(len(found), len(found) + count)
    names = (f"<|{(token_id - len(found)) / 50:.2f}|>" for token_id in added)
    return replace(found, tokens=(*found.tokens, *names), added_token_ids=found.added_token_ids.union(added))


def describe_encoder(folder: Path, config: dict[str, Any], vocabulary: Vocabulary) -> EncoderEntry:
    """The manifest's entry for the encoder of a checkpoint, and for how its decoder's texts begin.

    Raises:
        ExportError: when its configuration files do not say.
    """
    generation = config | read_json(folder / "generation_config.json")
    start = generation.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise ExportError(
            f"{folder} does not say with which token its decoder begins. Add decoder_start_token_id to "
            "generation_config.json."
        )
    kind, size = kind_of_encoder_decoder(config), len(vocabulary)
    forced = generation.get("forced_bos_token_id")
    return EncoderEntry(
        folder=ENCODER_FOLDER,
        kind="audio" if kind == "whisper" else "text",
        num_layers=config["num_layers" if kind == "t5" else "encoder_layers"],
        hidden_size=config["d_model"],
        context_length=_length(config, "max_source_positions"),
        sha256=_hash_of(folder, config),
        begin_token_ids=(start, forced) if isinstance(forced, int) else (start,),
        suppress_token_ids=_ids([*(generation.get("suppress_tokens") or []), *_bad_words(folder, generation)], size),
        begin_suppress_token_ids=_ids(generation.get("begin_suppress_tokens") or [], size),
        audio=_describe_audio(folder, generation, vocabulary) if kind == "whisper" else None,
    )


def _describe_audio(folder: Path, generation: dict[str, Any], vocabulary: Vocabulary) -> AudioEntry:
    """What Whisper's features and special tokens are, from preprocessor_config.json and generation_config.json."""
    if not (folder / "generation_config.json").is_file():
        raise ExportError(
            f"{folder} has no generation_config.json, which says what a Whisper's languages, tasks and timestamps are. "
            "Copy the file of the model that it was made from, such as openai/whisper-small."
        )
    # transformers 5 may write the feature extractor's values into processor_config.json.
    config = read_json(folder / "preprocessor_config.json")
    config = config or read_json(folder / "processor_config.json").get("feature_extractor") or {}
    names = ("sampling_rate", "n_fft", "hop_length", "chunk_length")
    if missing := [name for name in names if not isinstance(config.get(name), int)]:
        raise ExportError(
            f"{folder} has no preprocessor_config.json with {missing[0]}, so its audio features are not known. Save "
            "one with WhisperFeatureExtractor().save_pretrained(folder)."
        )
    bins = generation.get("num_mel_bins")
    if not isinstance(bins, int):
        raise ExportError(f"{folder}/config.json has no num_mel_bins, so its model's shape is not known.")
    if bins != config.get("feature_size", bins):
        raise ExportError(
            f"{folder} has num_mel_bins={bins} in config.json and feature_size={config['feature_size']} in "
            "preprocessor_config.json: they do not belong together."
        )
    no_timestamps = generation.get("no_timestamps_token_id", vocabulary.find("<|notimestamps|>"))
    languages = generation.get("lang_to_id") or {}
    has_languages = any(token and _LANGUAGE.fullmatch(token) for token in vocabulary.tokens)
    if not languages and generation.get("is_multilingual") is None and has_languages:
        raise ExportError(
            f"{folder}/generation_config.json has no lang_to_id, so its languages are not known. Copy the file of the "
            "model that it was made from, such as openai/whisper-small, or add is_multilingual: false."
        )
    tasks = generation.get("task_to_id") or {
        name: token_id for name in ("transcribe", "translate") if (token_id := vocabulary.find(f"<|{name}|>"))
    }
    if not isinstance(no_timestamps, int):
        raise ExportError(
            f"{folder} has no token <|notimestamps|>, so its texts cannot be begun as Whisper's are. Add "
            "no_timestamps_token_id to generation_config.json."
        )
    is_multilingual = generation.get("is_multilingual", bool(languages))
    previous = generation.get("prev_sot_token_id")
    return AudioEntry(
        sampling_rate=config["sampling_rate"],
        num_mel_bins=bins,
        window_length=config["n_fft"],
        hop_length=config["hop_length"],
        chunk_seconds=config["chunk_length"],
        no_timestamps_token_id=no_timestamps,
        first_timestamp_token_id=no_timestamps + 1,
        max_initial_timestamp=int(generation.get("max_initial_timestamp_index") or 50),
        languages={name.strip("<|>"): token_id for name, token_id in languages.items()} if is_multilingual else {},
        tasks=tasks if is_multilingual else {},
        no_speech_token_id=_find(vocabulary, "<|nospeech|>", "<|nocaptions|>"),
        previous_token_id=previous if isinstance(previous, int) else _find(vocabulary, "<|startofprev|>"),
    )


def _find(vocabulary: Vocabulary, *names: str) -> int | None:
    """The id of a token that has one of these names."""
    return next((token_id for name in names if (token_id := vocabulary.find(name)) is not None), None)


def _bad_words(folder: Path, generation: dict[str, Any]) -> list[int]:
    """The tokens of `bad_words_ids`: of a MarianMT, the padding that its texts begin with."""
    words: list[list[int]] = generation.get("bad_words_ids") or []
    if longer := [word for word in words if len(word) > 1]:
        raise ExportError(
            f"{folder} has {longer[0]} among its bad_words_ids, and Outrider bans single tokens only. Remove it from "
            "generation_config.json and config.json."
        )
    return [token_id for word in words for token_id in word]


def _ids(values: list[Any], size: int) -> tuple[int, ...]:
    return tuple(sorted({value for value in values if isinstance(value, int) and 0 <= value < size}))


def _hash_of(folder: Path, config: dict[str, Any]) -> str:
    """sha256 of an encoder's weights and of what else it depends on: equal hashes are equal encoders."""
    kind = kind_of_encoder_decoder(config) or ""
    digest = hashlib.sha256(json.dumps([kind, {key: config.get(key) for key in KINDS[kind]["shape"]}]).encode())
    for name, tensor in sorted(tensors_of(folder).items()):
        if name.startswith(tuple(KINDS[kind]["weights"])):
            digest.update(f"{name} {tensor.kind} {tensor.shape}".encode())
            digest.update(tensor.read())
    return digest.hexdigest()
