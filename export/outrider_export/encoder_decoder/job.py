"""The parts of an export that encoder-decoder models do in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.manifest import CROSS_NAME, MODEL_NAMES, EncoderEntry, Geometry
from outrider.errors import ExportError, OptionError
from outrider.system.core import new_core
from outrider_export.describe.encoder_decoder import ENCODER_FOLDER, kind_of_encoder_decoder
from outrider_export.describe.plan import Plan
from outrider_export.progress import Progress

WORK = "outrider_export.encoder_decoder.convert.convert"


def check_pair(main: Plan, drafts: list[Plan], draft_vocab: int | str | None, *, has_head: bool) -> None:
    """Check that an encoder-decoder model's draft model, if there is one, can draft for it.

    Raises:
        ExportError: if it cannot.
        OptionError: for an option that such models do not have.
    """
    encoder = main.encoder
    if encoder is None:
        if any(plan.encoder for plan in drafts):
            raise ExportError(
                f"{drafts[0].source.id} is an encoder-decoder model and {main.source.id} is none, so it cannot draft "
                "for it. Choose a draft model of the same kind."
            )
        return
    if has_head:
        raise ExportError(
            f"{main.source.id} is an encoder-decoder model, and heads such as EAGLE draft for decoders only. Choose a "
            "smaller model of its own kind, or export without --draft."
        )
    if draft_vocab is not None:
        raise OptionError(f"draft_vocab={draft_vocab!r} is not for encoder-decoder models. Leave it out.")
    for plan in drafts:
        own = plan.encoder
        if own is None:
            why = "is no encoder-decoder model"
        elif plan.vocabulary.tokens != main.vocabulary.tokens:
            why = f"has another vocabulary ({len(plan.vocabulary):,} tokens instead of {len(main.vocabulary):,})"
        elif (own.kind, own.begin_token_ids) != (encoder.kind, encoder.begin_token_ids):
            why = "begins its texts with other tokens"
        elif _features(own) != _features(encoder):
            why = "reads other audio features"
        else:
            continue
        raise ExportError(
            f"{plan.source.id} cannot draft for {main.source.id}: it {why}. Choose a smaller model of the same family."
        )


def _features(encoder: EncoderEntry) -> tuple[int, ...]:
    audio = encoder.audio
    if audio is None:
        return ()
    return audio.sampling_rate, audio.num_mel_bins, audio.window_length, audio.hop_length, audio.chunk_seconds


def place_encoder(plan: Plan, main: Plan, progress: Progress) -> EncoderEntry | None:
    """The entry of a model's encoder, if it has one, with its folder. A draft model may share the main model's."""
    encoder = plan.encoder
    if encoder is not None and not (plan.path / "generation_config.json").is_file():
        progress.note(
            f"{plan.source.id} has no generation_config.json: which tokens begin its texts, and which are never "
            "generated, is taken from config.json."
        )
    if plan is main or encoder is None or main.encoder is None:
        return encoder
    if encoder.sha256 == main.encoder.sha256:
        progress.note(f"{plan.source.id} has the encoder of {main.source.id}, which is stored and run once.")
        return encoder
    progress.note(f"{plan.source.id} has an encoder of its own, which is run in addition to that of {main.source.id}.")
    return msgspec.structs.replace(encoder, folder=f"{plan.role}-{ENCODER_FOLDER}")


def job_of(plan: Plan, encoder: EncoderEntry, new: Path) -> dict[str, Any]:
    """What the child process needs to know besides the job of every model. new: the bundle's folder."""
    folder = new / encoder.folder
    return {"kind": kind_of_encoder_decoder(plan.config), "encoder": None if folder.exists() else str(folder)}


def check_written(folder: Path, encoder: Path, geometry: Geometry) -> None:
    """Check that a converted model can be read and has its source's shape.

    Raises:
        ExportError: with the differences.
    """

    core = new_core()
    name = MODEL_NAMES["openvino"][0]
    try:
        decoder, *_ = (core.read_model(path) for path in (folder / name, folder / CROSS_NAME, encoder / name))
    except RuntimeError as error:
        raise ExportError(f"The converted model cannot be read back: {' '.join(str(error).split())[:300]}") from error
    width = decoder.output("logits").get_partial_shape()[2]
    num_layers = sum(port.get_any_name().startswith("past.") for port in decoder.inputs) // 2
    if (str(width), num_layers) != (str(geometry.logits_width), geometry.num_layers):
        raise ExportError(
            f"The converted model has {width} logits and {num_layers} layers, where its configuration promises "
            f"{geometry.logits_width} and {geometry.num_layers}: Outrider does not run such a model."
        )
