"""`outrider transcribe`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from outrider.cli.console import out, print_json
from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import generation_options, json_option, load_options, read_options, trace_option, tracing


def _number_or_none(context: click.Context, parameter: click.Parameter, given: str) -> float | None:
    """A number, or None for "none"."""
    if given == "none":
        return None
    try:
        return float(given)
    except ValueError as error:
        raise click.BadParameter(f"'{given}' is neither a number nor none.", context, parameter) from error


def _threshold(name: str, default: str, says: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    described = f"{says} none: off.  [default: {default}]"
    return click.option(name, metavar="X|none", default=default, callback=_number_or_none, help=described)


# Options of `Engine.transcribe` that are handed on as they are.
_ASKED = (
    "language", "task", "without_timestamps", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
    "condition_on_previous_text",
)  # fmt: skip


@click.command()
@model_argument
@click.argument("file")
@click.option("--language", metavar="CODE", help="Language of the audio, such as en.  [default: found in the audio]")
@click.option("--task", type=click.Choice(["transcribe", "translate"]), help="translate: write English.")
@click.option("--timestamps", is_flag=True, help="Print when each segment begins and ends.")
@click.option("--without-timestamps", is_flag=True, help="Have the model write none: each window is 30 s then.")
@_threshold(
    "--temperature-increment-on-fallback", "0.2", "Added to --temperature where a window's text fails, up to 1."
)
@_threshold("--compression-ratio-threshold", "2.4", "A text that zlib makes smaller by more than this fails.")
@_threshold("--logprob-threshold", "-1.0", "A text whose tokens have a lower mean log-probability fails.")
@_threshold("--no-speech-threshold", "0.6", "A text that fails is silence if <|nospeech|> is more probable than this.")
@click.option(
    "--condition-on-previous-text", is_flag=True, help="Have the model read the text of earlier windows, too."
)
@trace_option
@load_options
@generation_options
@json_option
def transcribe(
    bundle: str,
    draft: str | None,
    file: str,
    temperature_increment_on_fallback: float | None,
    timestamps: bool,
    trace: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Transcribe FILE, an audio file, with a Whisper MODEL.

    MODEL is a bundle, a checkpoint folder or a hub id. Longer audio than 30 s is read in windows, each of which begins
    where the last complete segment ended. A window whose text fails is decoded again at higher temperatures. WAV files
    of 16,000 samples per second are read as they are; others need the extra "audio".
    """
    asked = {name: options.pop(name) for name in _ASKED}
    config = read_options(options)
    temperature = _temperatures(config.generation.temperature, temperature_increment_on_fallback)
    engine = load_model(open_model(bundle, draft, quiet=as_json, config=config), config)
    with tracing(engine, trace):
        found = engine.transcribe(file, timestamps=timestamps, temperature=temperature, **asked)
    if as_json:
        print_json(found.as_dict())
    elif timestamps:
        for segment in found.segments:
            out.print(f"[{_clock(segment.begin)} - {_clock(segment.end)}] {segment.text.strip()}", markup=False)
    else:
        out.print(found.text.strip(), markup=False, highlight=False)


def _temperatures(first: float, increment: float | None) -> list[float]:
    """The first, and all that fallback goes through, up to 1."""
    if increment is None or increment <= 0:
        return [first]
    return [first, *(round(each, 6) for i in range(1, 1001) if (each := first + i * increment) <= 1 + 1e-6)]


def _clock(seconds: float) -> str:
    """Minutes and seconds, such as 01:02.34."""
    return f"{int(seconds // 60):02d}:{seconds % 60:05.2f}"
