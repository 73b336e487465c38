"""`outrider add`."""

from typing import Any

import click

from outrider.bundle.folder import Bundle
from outrider.cli.console import out, print_json
from outrider.cli.export import Bars
from outrider.cli.opening import open_model
from outrider.cli.options import export_half, json_option
from outrider.config.files import user_path
from outrider.errors import OptionError
from outrider.system.files import usable


@click.command()
@click.argument("bundle")
@click.argument("part")
@click.option("--name", metavar="NAME", help="Its name for requests.  [default: its kind; an adapter's folder]")
@click.option("--weights", metavar="FORMAT", help="int8, fp16 or fp32; for draft models also int4.")
@click.option(
    "--draft-vocab",
    metavar="N|all",
    help="How many different tokens it proposes, if it has an output matrix; by default as many as pay.",
)
@click.option("--draft-vocab-corpus", metavar="FILE", help="Choose these tokens by a text that resembles your answers.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of PART on the hub.")
@json_option
def add(bundle: str, part: str, as_json: bool, name: str | None, weights: str | None, **options: Any) -> None:
    """Add to BUNDLE a drafter or a LoRA adapter.

    PART is a checkpoint folder, .gguf file or hub id of a drafter: EAGLE-3, MTP, DFlash, DSpark, Gemma 4's
    assistants, or a draft model with the main model's vocabulary. Or it is the folder of a packed drafter,
    which needs no further packages, or of an adapter in PEFT's format, which requests choose by its name.

    Of a drafter it prints what drafts cost on this machine, and how many tokens have to be accepted to make up for
    that, if the main model was loaded before or loads in seconds.
    """
    from outrider.cli.drafter_costs import acceptance_in, as_dict, measure_drafter, show

    with export_half():
        from outrider_export import add_adapter, add_drafter
        from outrider_export.sources.source import fetch, locate
    is_adapter = (usable(user_path(part)) / "adapter_config.json").is_file()
    if is_adapter:
        for option, value in {"weights": weights, **options}.items():
            if value is not None:
                raise OptionError(
                    f"--{option.replace('_', '-')} is for drafters, and {part} is an adapter. Leave it out."
                )
    opened = open_model(bundle, None, quiet=as_json)
    with Bars(quiet=as_json) as bars:
        if is_adapter:
            _report_adapter(add_adapter(opened.folder, part, name=name, progress=bars), as_json=as_json)
            return
        source = fetch(locate(part, options["revision"]), trust_remote_code=False, progress=bars)
        acceptance = acceptance_in(source.fetched)
        made = add_drafter(opened.folder, part, name=name, weights=weights, progress=bars, **options)
    entry = made.manifest.drafters[-1]
    size = made.size_of(entry.model.folder)
    found = measure_drafter(made, entry.name, acceptance)
    if as_json:
        described = {"name": entry.name, "kind": entry.kind, "bytes": size}
        print_json({"bundle": str(made.folder), **described, **as_dict(found)})
        return
    out.print(f"{bundle} now has a drafter '{entry.name}' ({entry.kind}, {size / 1e6:.1f} MB).")
    show(found)
    out.print(
        f"Try it: outrider generate {bundle} 'Write a haiku about sledges' --drafter {entry.name} --compare",
        soft_wrap=True,
    )


def _report_adapter(bundle: Bundle, *, as_json: bool) -> None:
    entry = bundle.manifest.adapters[-1]
    size = bundle.size_of(entry.folder)
    if as_json:
        described = {"name": entry.name, "kind": "adapter", "rank": entry.rank, "targets": entry.targets}
        print_json({"bundle": str(bundle.folder), **described, "bytes": size})
        return
    targets = ", ".join(target.split(".")[-1] for target in entry.targets)
    out.print(
        f"{bundle.folder} now has an adapter '{entry.name}' (rank {entry.rank} in {targets}, {size / 1e6:.1f} MB)."
    )
    out.print(
        f"Try it: outrider generate {bundle.folder} 'Write a haiku about sledges' --adapter {entry.name}",
        soft_wrap=True,
    )
