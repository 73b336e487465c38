"""`outrider import`."""

from __future__ import annotations

from typing import Any

import click

from outrider.cli.export import make
from outrider.cli.options import export_half, json_option


@click.command(name="import")
@click.argument("main")
@click.option("--draft", metavar="DRAFT", help="Draft model, of the same kinds as MAIN.")
@click.option("-o", "--output", metavar="BUNDLE", help="Folder to make.  [default: named after MAIN]")
@click.option("--file", metavar="NAME", help="MAIN's model among several, such as onnx/model_q4.onnx.")
@click.option("--draft-file", metavar="NAME", help="The same for the draft model.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of MAIN on the hub.")
@click.option("--draft-revision", metavar="NAME", help="The same for the draft model.")
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle once the new one is complete.")
@json_option
def import_(main: str, draft: str | None, output: str | None, as_json: bool, **options: Any) -> None:
    """Make a bundle of ONNX models, without converting them.

    MAIN is a folder in the format of onnxruntime-genai, or of onnx-community on the Hugging Face hub, or a hub id.
    """
    with export_half("onnx"):
        from outrider_export import default_output, import_bundle
    output = output or str(default_output(main, draft))
    make(lambda bars: import_bundle(main, draft, output=output, progress=bars, **options), output, as_json)
