"""`outrider peer-draft`."""

from __future__ import annotations

import click

from outrider.cli.console import out
from outrider.cli.opening import open_model
from outrider.config.files import user_path
from outrider.errors import ExportError, needs
from outrider.system.files import usable


@click.command(name="peer-draft")
@click.argument("bundle")
@click.argument("name")
@click.option("-o", "--output", metavar="FOLDER", required=True, help="Folder to make.")
def peer_draft(bundle: str, name: str, output: str) -> None:
    """Write BUNDLE's drafter NAME, EAGLE-3 or DFlash, for openvino-genai.

    openvino_genai.draft_model loads the folder, and outrider bench compares with it.
    """
    with needs("The export half of outrider is not installed", "export", ExportError):
        from outrider_export.heads.genai import write_for_genai
    opened, folder = open_model(bundle, None, quiet=False), usable(user_path(output))
    write_for_genai(opened, name, folder)
    entry = next(entry for entry in opened.manifest.drafters if entry.name == name)
    mode, number = f"genai-{entry.kind}", entry.num_places or 3
    modes = f"plain,{name}:{number},genai,{mode}:{number}"
    out.print(f"Compare with it: outrider bench {bundle} --modes {modes} --peer-model {mode}={output}", soft_wrap=True)
