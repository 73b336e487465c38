"""`outrider serve`."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Any

import click

from outrider.cli.console import err, out, print_json
from outrider.cli.options import generation_options, json_option, load_options, read_options
from outrider.errors import OptionError, OutriderError


@click.command()
@click.argument("bundles", metavar="[NAME=]BUNDLE...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--api-key", envvar="OUTRIDER_API_KEY", metavar="KEY", help="Clients must send it.  [$OUTRIDER_API_KEY]")
@click.option("--no-api-key", is_flag=True, help="Let anyone in who reaches an address that is not this machine's own.")
@click.option("--allowed-host", multiple=True, metavar="NAME", help="A name that clients may use. Several times.")
@click.option("--max-running", type=click.IntRange(1), default=32, show_default=True, help="Answers at a time.")
@click.option("--max-waiting", type=click.IntRange(0), default=128, show_default=True, help="In the queue; then 429.")
@click.option("--max-body", type=click.FloatRange(0.001), default=4.0, show_default=True, help="MB of a request.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds for an answer.")
@click.option("--grace", type=click.IntRange(0), default=30, show_default=True, help="Seconds for streams at the end.")
@click.option("--idle-minutes", type=click.FloatRange(0, min_open=True), help="Unload models unused for so long.")
@click.option("--access-log", is_flag=True, help="Print a line for each request.")
@load_options
@generation_options
@json_option
def serve(
    bundles: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    no_api_key: bool,
    allowed_host: tuple[str, ...],
    max_running: int,
    max_waiting: int,
    max_body: float,
    timeout: float,
    grace: int,
    idle_minutes: float | None,
    access_log: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve BUNDLEs to clients of OpenAI's API.

    NAME is that of the bundle's folder unless given. A single bundle is loaded at once, several when requests ask for
    them. Options of generation are the defaults of requests.
    """
    try:
        from outrider.server import Settings, make_app
        from outrider.server.run import listen, run, url_of
    except ImportError as error:
        raise OutriderError(f'The server is not installed ({error}). Run: pip install "outrider[server]"') from error
    check_access(host, api_key, no_api_key)
    named = name_bundles(bundles)
    settings = Settings(
        api_key=api_key or None,
        allowed_hosts=allowed_host,
        max_running=max_running,
        max_waiting=max_waiting,
        max_body=int(max_body * 1e6),
        request_seconds=timeout,
        idle_seconds=None if idle_minutes is None else idle_minutes * 60,
    )
    app = make_app(named, settings, read_options(options))
    with listen(host, port) as listening:
        url, models = url_of(listening), app.state.service.models.all
        if len(models) == 1:  # clients that come before it is loaded wait
            with err.status(f"Loading {models[0].name}", spinner="dots"):
                models[0].load()

        def ready() -> None:
            if as_json:
                print_json({"url": url, "models": list(named)})
                sys.stdout.flush()
            else:
                _announce(url, next(iter(named)), needs_key=bool(api_key))
                if not api_key and not _is_own(host):
                    err.print("Anyone who reaches this address may use it.")

        run(app, listening, grace=grace, access_log=access_log, ready=ready)


def name_bundles(bundles: tuple[str, ...]) -> dict[str, str]:
    """Folders by the names that requests ask for.

    Raises:
        OptionError: for a name that occurs twice.
    """
    named: dict[str, str] = {}
    for given in bundles:
        name, sign, path = given.partition("=")
        if not sign or Path(given).exists():
            name, path = Path(given).resolve().name, given
        if not name or not path:
            raise OptionError(f"'{given}' is neither a bundle nor NAME=BUNDLE.")
        if name in named:
            raise OptionError(f"Two bundles are named '{name}'. Name one otherwise: other={path}.")
        named[name] = path
    return named


def check_access(host: str, api_key: str | None, no_api_key: bool) -> None:
    """Whether it was decided who may reach the server.

    Raises:
        OptionError: for an address that others reach, without a key and without the flag.
    """
    if not (api_key or no_api_key or _is_own(host)):
        raise OptionError(
            f"--host {host} lets other machines in, and there is no API key. Set OUTRIDER_API_KEY or --api-key, or let "
            "anyone in with --no-api-key."
        )


def _is_own(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(url: str, model: str, *, needs_key: bool) -> None:
    key = ' -H "Authorization: Bearer $OUTRIDER_API_KEY"' if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    out.print(f"Serving OpenAI's API at {url}/v1 and a page at {url} until Ctrl-C. Try it:")
    out.print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
