"""`outrider transcribe`."""

from __future__ import annotations

from typing import Any

import click

from outrider.cli.console import out, print_json
from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import generation_options, json_option, load_options, read_options, trace_option, tracing


@click.command()
@model_argument
@click.argument("file")
@click.option("--language", metavar="CODE", help="Language of the audio, such as en.  [default: found in the audio]")
@click.option("--task", type=click.Choice(["transcribe", "translate"]), help="translate: write English.")
@click.option("--timestamps", is_flag=True, help="Print when each segment begins and ends.")
@trace_option
@load_options
@generation_options
@json_option
def transcribe(
    bundle: str,
    draft: str | None,
    file: str,
    language: str | None,
    task: str | None,
    timestamps: bool,
    trace: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Transcribe FILE, a .wav file, with a Whisper MODEL.

    MODEL is a bundle, a checkpoint folder or a hub id. FILE has 16,000 samples per second. Longer audio than 30 s is
    read in windows.
    """
    config = read_options(options)
    engine = load_model(open_model(bundle, draft, quiet=as_json), config)
    with tracing(engine, trace):
        found = engine.transcribe(file, language=language, task=task, timestamps=timestamps)
    if as_json:
        print_json(found.as_dict())
    elif timestamps:
        for segment in found.segments:
            out.print(f"[{_clock(segment.begin)} - {_clock(segment.end)}] {segment.text.strip()}", markup=False)
    else:
        out.print(found.text.strip(), markup=False, highlight=False)


def _clock(seconds: float) -> str:
    """Minutes and seconds, such as 01:02.34."""
    return f"{int(seconds // 60):02d}:{seconds % 60:05.2f}"
