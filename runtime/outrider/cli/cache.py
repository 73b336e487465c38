"""`outrider cache`."""

from __future__ import annotations

import click
from rich.filesize import decimal

from outrider.cli.console import day_and_time, out, print_json, table
from outrider.cli.options import json_option
from outrider.config.files import user_path


@click.group(invoke_without_command=True)
@click.option("--folder", metavar="FOLDER", help="A store other than that of --prefix-store auto.")
@json_option
@click.pass_context
def cache(context: click.Context, folder: str | None, as_json: bool) -> None:
    """Show the contents of the prefix store (--prefix-store), or delete them.

    The table has, for each model and setting, the number of saved tokens of prompts and answers.
    """
    from outrider.models.kv import PREFIXES
    from outrider.models.kv.chunk_files import folders_in

    store = context.obj = PREFIXES if folder is None else user_path(folder)
    if context.invoked_subcommand is not None:
        return
    found = [each for each in folders_in(store) if each.num_tokens]
    size = sum(each.size for each in found)
    if as_json:
        models = [
            {
                **each.about,
                "folder": str(each.path),
                "tokens": each.num_tokens,
                "bytes": each.size,
                "last_used": day_and_time(each.used).isoformat(timespec="seconds"),
            }
            for each in found
        ]
        print_json({"folder": str(store), "bytes": size, "models": models})
        return
    if not found:
        out.print(f"{store} is empty. Fill it: outrider chat model.gguf --prefix-store auto", soft_wrap=True)
        return
    made = table("model", "tokens", "size", "last used", "setting", text=1)
    for each in found:
        about = {"bundle": "not known", "model": "", "setting": ""} | each.about
        used = f"{day_and_time(each.used):%Y-%m-%d %H:%M}"
        made.add_row(
            f"{about['bundle']}\n{about['model']}", f"{each.num_tokens:,}", decimal(each.size), used, about["setting"]
        )
    out.print(made)
    out.print(f"{decimal(size)} in {store}. To delete it: outrider cache clear", soft_wrap=True)


@cache.command()
@json_option
@click.pass_obj
def clear(store: object, as_json: bool) -> None:
    """Delete the whole store. Programs that use it keep running, and fill it again."""
    from outrider.models.kv.chunk_files import empty

    folder = user_path(str(store))
    size = empty(folder)
    if as_json:
        print_json({"folder": str(folder), "bytes": size})
        return
    out.print(f"Deleted {decimal(size)} in {folder}.", soft_wrap=True)
