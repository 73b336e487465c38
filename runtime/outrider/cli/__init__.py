"""The command line: `outrider COMMAND`.

Internal: apps import what docs/api.md lists.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import warnings
from keyword import iskeyword
from typing import TextIO

import click

from outrider.cli.progress import show_progress
from outrider.errors import DeviceWarning, ExactnessWarning, OptionError, OutriderError, nearest
from outrider.system.plugins import plugins
from outrider.version import __version__

OUR_WARNINGS = (DeviceWarning, ExactnessWarning)

COMMANDS = (
    "add",
    "bench",
    "cache",
    "chat",
    "demo",
    "devices",
    "export",
    "generate",
    "import",
    "inspect",
    "models",
    "serve",
    "trace",
    "transcribe",
    "tune",
    "tune-layers",
    "verify",
)


class _Commands(click.Group):
    """Loads a command's module when the command is used, as each needs few of the others' imports.

    Other packages may add commands: see `outrider.system.plugins`. They replace none of ours.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted({*COMMANDS, *plugins("commands")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            if (brought := plugins("commands").get(cmd_name)) is None:
                raise OptionError(f"There is no command '{cmd_name}'. {nearest(cmd_name, self.list_commands(ctx))}")
            added: click.Command = brought.load()
            return added
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"outrider.cli.{name}"), name)
        return command


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="outrider")
@click.pass_context
def root(context: click.Context) -> None:
    """Speculative decoding on CPUs: the same text, faster, and never slower.

    An answer loses at most 2.5 % of its time to drafts, or 0.4 of a token's time if it is short, and what a draft model
    that is known to pay takes to read the prompt.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 for success, 1 for a failure, 2 for wrong usage, 130 on Ctrl-C.

    Errors are one line on standard error. OUTRIDER_DEBUG=1 shows tracebacks.
    """
    # With this package, importing OpenVINO sends usage statistics, from a fork of this process.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """As `main`, but returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _speak_utf8()
    try:
        show_progress()
        # Not `root.main`, which prints interrupts and closed pipes in its own way.
        with warnings.catch_warnings(), root.make_context("outrider", list(arguments)) as context:
            for kind in OUR_WARNINGS:
                warnings.simplefilter("always", kind)
            warnings.showwarning = _warn
            root.invoke(context)
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except OutriderError as error:
        return _fail(error, str(error), error.exit_code)
    except click.ClickException as error:
        return _fail(error, _usage(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        return _fail(error, "Cancelled.", 130)
    except SystemExit:  # rich raises this when our output's reader has closed the pipe
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EINVAL):  # EINVAL is Windows'
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _fail(
            error,
            f"{type(error).__name__}: {error} (unexpected: set OUTRIDER_DEBUG=1 for the traceback, and report it)",
            1,
        )
    return 0


def _speak_utf8() -> None:
    """Read and write UTF-8 on all streams: Windows uses an encoding with few characters for redirected ones.

    A byte order mark, with which PowerShell and editors begin a text, is not part of it.
    """
    for stream, encoding, errors in (
        (sys.stdin, "utf-8-sig", "surrogateescape"),
        (sys.stdout, "utf-8", "backslashreplace"),
        (sys.stderr, "utf-8", "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors=errors)


def _usage(error: click.ClickException) -> str:
    command = getattr(getattr(error, "ctx", None), "command_path", None)
    hint = f" See '{command} --help'." if command else ""
    return error.format_message() + hint


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print our own warnings in one line, and others as Python does."""
    text = f"outrider: {message}\n"
    if not issubclass(category, OUR_WARNINGS):
        text = warnings.formatwarning(message, category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def _fail(error: BaseException, message: str, exit_code: int) -> int:
    if os.environ.get("OUTRIDER_DEBUG"):
        raise error
    print("outrider:", " ".join(message.split()), file=sys.stderr)
    return exit_code
