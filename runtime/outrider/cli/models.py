"""`outrider models`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from outrider.cli.console import day_and_time, out, print_json, table
from outrider.cli.options import export_half, json_option
from outrider.system import saved

if TYPE_CHECKING:
    from outrider_export.bundles.bundle_cache import BundleCache


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the bundles in the cache folder, or remove some.

    All commands take a .gguf file, a checkpoint folder or a hub id in place of a bundle. The model is exported once, to
    a bundle in the cache folder. The list has these bundles and their sources. Commands take their names, too.
    """
    if context.invoked_subcommand is None:
        _list(open_cache(), as_json)


@models.command()
@click.argument("names", metavar="NAME...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Remove all of them.")
@json_option
def remove(names: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Remove bundles from the cache folder. The models themselves stay.

    NAME is a name of the list, or its beginning. A model is exported again when it is used the next time.
    """
    if every == bool(names):
        raise click.UsageError("Give names as 'outrider models' lists them, or --all, and not both.")
    cache = open_cache()
    entries = cache.entries() if every else list({entry.name: entry for entry in map(cache.find, names)}.values())
    before = cache.size
    for entry in entries:
        cache.remove(entry)
    cache.tidy()
    size = before - cache.size  # files that others have stay
    if as_json:
        print_json({"removed": [entry.name for entry in entries], "bytes": size})
        return
    out.print(f"Removed {', '.join(entry.name for entry in entries) or 'nothing'}: {decimal(size)}.")


def open_cache() -> BundleCache:
    """The user's cache of bundles.

    Raises:
        ExportError: when the export half is not installed.
    """
    with export_half():
        from outrider_export.bundles.bundle_cache import BundleCache
    return BundleCache(saved.FOLDER)


def _list(cache: BundleCache, as_json: bool) -> None:
    entries = cache.entries()
    size = cache.size
    if as_json:
        found = [
            {
                "name": entry.name,
                "bundle": str(entry.folder),
                "bytes": entry.size,
                "sources": [
                    {"role": each.role, "kind": each.kind, "name": each.name, "state": cache.state_of(each)}
                    for each in entry.sources
                ],
                "last_used": day_and_time(entry.last_used).isoformat(timespec="seconds"),
            }
            for entry in entries
        ]
        print_json({"folder": str(cache.folder), "bytes": size, "models": found})
        return
    if not entries:
        out.print(f"{cache.folder} has no bundles. To make one: outrider chat model.gguf")
        return
    made = table("name", "size", "last used", "made of", text=1)
    for entry in entries:
        states = ((each.name, cache.state_of(each)) for each in entry.sources)
        made_of = [name if state == "there" else f"{name} ({state})" for name, state in states]
        used = f"{day_and_time(entry.last_used):%Y-%m-%d %H:%M}"
        made.add_row(entry.name, decimal(entry.size), used, "\n".join(made_of) or "not known")
    out.print(made)
    out.print(f"{decimal(size)} in {cache.folder}", soft_wrap=True)
