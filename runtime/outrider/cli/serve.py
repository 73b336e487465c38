"""`outrider serve`."""

from __future__ import annotations

import ipaddress
import re
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.bundle import Bundle
from outrider.bundle.folder import draft_models_of, read_bundle
from outrider.bundle.kinds import COPYING
from outrider.cli.console import err, out, print_json
from outrider.cli.opening import draft_option, open_model
from outrider.cli.options import FiniteRange, generation_options, json_option, load_options, read_options
from outrider.cli.progress import progress_line, shown_in_background
from outrider.config import Config
from outrider.engine.opening import is_model
from outrider.errors import OptionError, OutriderError, nearest, needs
from outrider.system.plugins import plugins

if TYPE_CHECKING:
    from outrider.server import Settings


@click.command()
@click.argument("bundles", metavar="[NAME=]MODEL...", nargs=-1, required=True)
@draft_option
@click.option("--host", default="localhost", show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen at; 0: any free port.",
)
@click.option(
    "--api-key", envvar="OUTRIDER_API_KEY", metavar="KEY", help="Key that clients must send.  [$OUTRIDER_API_KEY]"
)
@click.option("--no-api-key", is_flag=True, help="Allow clients of other machines without a key.")
@click.option("--allowed-host", multiple=True, metavar="NAME", help="A host name that clients may use. Several times.")
@click.option(
    "--max-running", type=click.IntRange(1), default=32, show_default=True, help="Answers generated at a time."
)
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=128,
    show_default=True,
    help="Answers in the queue; further ones get status 429.",
)
@click.option("--max-body", type=FiniteRange(0.001, 1e6), default=4.0, show_default=True, help="MB of a request.")
@click.option("--timeout", type=FiniteRange(1), default=600.0, show_default=True, help="Seconds for an answer.")
@click.option(
    "--grace",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that running answers have when the server ends.",
)
@click.option(
    "--idle-minutes", type=FiniteRange(0, min_open=True), help="Unload models after so many minutes without requests."
)
@click.option("--strict-calls", is_flag=True, help="Take as a call only what has the marker of the model's format.")
@click.option("--strict-model-names", is_flag=True, help="Refuse an unknown model's name also where one is served.")
@click.option(
    "--allow-origin", multiple=True, metavar="URL", help="Origin of web pages that may use the server. Several times."
)
@click.option("--access-log", is_flag=True, help="Print a line for each request.")
@load_options
@generation_options
@json_option
def serve(
    bundles: tuple[str, ...],
    draft: str | None,
    host: str,
    port: int,
    api_key: str | None,
    no_api_key: bool,
    grace: int,
    access_log: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve MODELs to clients of OpenAI's API.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id; embedding models and rerankers may be among them.

    NAME is the model's name for requests. Its default is the name of the bundle's folder. A single model is loaded
    at the start, several at the first request for each. Options of generation are the defaults of requests.
    """
    with needs("The server is not installed", "server", OutriderError):
        from outrider.server import make_app
        from outrider.server.run import listen_all, run, url_of
        from outrider.system.memory import return_large_buffers
    host = host.removeprefix("[").removesuffix("]")  # as an address of IPv6 stands in a URL
    check_access(host, api_key, no_api_key)
    named = name_bundles(bundles, draft)
    settings = _settings(options, api_key)
    if settings.idle_seconds is not None:
        return_large_buffers()
    config = read_options(options)
    for each in listen_all(host, port):  # a model may have to be converted first, which takes minutes
        each.close()
    made = {name: open_model(it, draft, quiet=as_json, config=config, main_first=True) for name, it in named.items()}
    app = make_app(made, settings, config)
    for model in app.state.service.models.all:
        check_drafter(model.bundle, config)
    with ExitStack() as stack:
        stack.enter_context(shown_in_background())
        listening = [stack.enter_context(each) for each in listen_all(host, port)]
        url, models = url_of(listening[0]), app.state.service.models.all
        loading = stack.enter_context(ExitStack())
        if len(models) == 1:
            loading.enter_context(progress_line(f"Loading {models[0].name}.", quiet=True))

        def ready() -> None:
            loading.close()
            if as_json:
                print_json({"url": url, "models": list(named)})
                sys.stdout.flush()
            else:
                _announce(url, models[0].name if models else None, needs_key=bool(api_key), is_own=_is_own(host))

        run(app, listening, grace=grace, access_log=access_log, ready=ready, ending=partial(_say_ending, grace))


def _settings(options: dict[str, Any], api_key: str | None) -> Settings:
    """The server's own among the options, which are taken out."""
    from outrider.server import Settings

    minutes = options.pop("idle_minutes")
    return Settings(
        api_key=api_key or None,
        allowed_hosts=options.pop("allowed_host"),
        max_running=options.pop("max_running"),
        max_waiting=options.pop("max_waiting"),
        max_body=int(options.pop("max_body") * 1e6),
        request_seconds=options.pop("timeout"),
        strict_models=options.pop("strict_model_names"),
        loose_calls=not options.pop("strict_calls"),
        allowed_origins=check_origins(options.pop("allow_origin"), api_key),
        idle_seconds=None if minutes is None else minutes * 60,
    )


def _say_ending(grace: int, num_answers: int) -> None:
    """Say how long running answers have."""
    answers = "an answer" if num_answers == 1 else f"{num_answers} answers"
    err.print(f"Waiting up to {grace} s for {answers}. Press Ctrl-C again to end at once.")


def name_bundles(bundles: tuple[str, ...], draft: str | None = None) -> dict[str, str]:
    """Bundles and models by the names that requests ask for.

    Raises:
        OptionError: for a name that occurs twice, or a draft model for several.
    """
    if draft not in (None, "auto") and len(bundles) > 1:
        raise OptionError(
            f"--draft {draft} is for one model, and {len(bundles)} are named. Export the pairs with 'outrider export', "
            "and name the bundles."
        )
    named: dict[str, str] = {}
    for given in bundles:
        name, sign, path = given.partition("=")
        if not sign or Path(given).exists():
            name, path = _name_of(given), given
        if not name or not path:
            raise OptionError(f"'{given}' is neither a model nor NAME=MODEL.")
        if name in named:
            raise OptionError(f"Two models are named '{name}'. Give one another name: other={path}.")
        named[name] = path
    return named


def _name_of(model: str) -> str:
    """A bundle's folder; for a model, the name that an export gives to its bundle."""
    folder = Path(model).resolve()
    if folder.is_dir() and not is_model(folder):
        return folder.name
    try:
        from outrider_export.sources.source import default_name
    except ImportError:
        return folder.name
    return default_name(model)


def check_drafter(bundle: Bundle, config: Config) -> None:
    """Whether a bundle has the drafter that requests without one are to use.

    Raises:
        OptionError: when it has not.
    """
    wanted, other = config.generation.drafter, config.device.draft_bundle
    drafters = draft_models_of(bundle if other is None else read_bundle(other), bundle)
    known = ("auto", *COPYING, *plugins("drafters"), *(entry.name for entry in drafters))
    if wanted is not None and wanted not in known:
        raise OptionError(f"{bundle.folder} has no drafter '{wanted}'. {nearest(wanted, (*known, 'none'))}")


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


def check_origins(origins: tuple[str, ...], api_key: str | None) -> tuple[str, ...]:
    """The origins of web pages that may use the server.

    Raises:
        OptionError: for one that is none, or for all without a key: any page could then use the server.
    """
    for origin in origins:
        if origin == "*" and not api_key:
            raise OptionError(
                "--allow-origin '*' lets every web page use the server, and there is no API key. Set OUTRIDER_API_KEY "
                "or --api-key, or name the origins."
            )
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise OptionError(f"--allow-origin {origin} is no origin. Name one as http://localhost:3000.")
    return origins


def check_access(host: str, api_key: str | None, no_api_key: bool) -> None:
    """Whether it was decided who may reach the server.

    Raises:
        OptionError: for an address that others reach, without a key and without the flag.
    """
    if not (api_key or no_api_key or _is_own(host)):
        raise OptionError(
            f"--host {host} is open to other machines, and there is no API key. Set OUTRIDER_API_KEY or --api-key, or "
            "allow access without a key with --no-api-key."
        )


def _is_own(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(url: str, model: str | None, *, needs_key: bool, is_own: bool) -> None:
    """Say where the server is. model: one that writes, if there is one. is_own: only this machine reaches it."""
    if not needs_key and not is_own:
        err.print("Everyone who can reach this address may use the server, as there is no API key.")
    if model is None:
        out.print(f"Serving OpenAI's API at {url}/v1 until Ctrl-C, without a model that writes.", soft_wrap=True)
        return
    key = ' -H "Authorization: Bearer $OUTRIDER_API_KEY"' if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    out.print(f"Serving OpenAI's API at {url}/v1 and a page at {url} until Ctrl-C. Try it:", soft_wrap=True)
    out.print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'", soft_wrap=True)
