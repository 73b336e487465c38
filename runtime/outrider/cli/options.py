"""Options that several commands share: those of `outrider.config`, by their descriptions, and a few more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.console import err
from outrider.config import Config, DeviceConfig, GenerationConfig, SchedulerConfig, without_word
from outrider.config.files import find_presets, load_config, user_path
from outrider.config.option import Option, options_of
from outrider.errors import ExportError, OptionError, needs
from outrider.system.files import shown, why

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


class FiniteRange(click.FloatRange):
    """A range of numbers, without "nan", which is above no limit and below none, and "inf"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def _pairs_of(metavar: str, kind: type) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], Any]:
    """Reads a table from pairs, with values of this kind; None without pairs."""

    def read(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any] | None:
        table: dict[str, Any] = {}
        for pair in given:
            name, sign, value = pair.partition("=")
            if name in table:
                raise click.BadParameter(f"'{pair}' is the second value for {name}.", context, parameter)
            try:
                table[name] = kind(value)
            except ValueError:
                sign = ""
            if not name or not sign:
                raise click.BadParameter(f"'{pair}' is not {metavar}.", context, parameter)
        return table or None

    return read


def _number_or_auto(kind: Callable[[str], float]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Reads a number of this kind, or "auto"."""

    def read(context: click.Context, parameter: click.Parameter, given: str | None) -> float | str | None:
        if given is None or given == "auto":
            return given
        try:
            return kind(given)
        except ValueError as error:
            raise click.BadParameter(f"'{given}' is neither a number nor auto.", context, parameter) from error

    return read


def _read_names(context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[str, ...] | None:  # noqa: ARG001
    """Names with commas between them; "none" is none of them."""
    if given is None:
        return None
    return tuple(name for each in given.split(",") if (name := each.strip()) and name != "none")


def _read_switch(context: click.Context, parameter: click.Parameter, given: str | None) -> bool | str | None:  # noqa: ARG001
    """True, False or "auto"."""
    return given if given in (None, "auto") else given == "on"


def _check_trace(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:  # noqa: ARG001
    """Check that the file can be written, before models are loaded. Its content is not changed yet."""
    if given is not None:
        path = user_path(given)
        try:
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise OptionError(f"Trace {shown(path)} cannot be written: {why(error)}. Name another file.") from error
    return given


def _parameter(name: str, described: Option) -> Callable[..., Any]:
    """An option of `outrider.config` as one of the command line."""
    kind, default = described.values.kind, described.default
    form: dict[str, Any] = {"metavar": described.metavar}
    if default is False:
        form |= {"is_flag": True, "default": None}
    elif kind is bool:
        form |= {"type": click.Choice(["auto", "on", "off"][default != "auto" :]), "callback": _read_switch}
    elif kind is Mapping:
        form |= {"multiple": True, "callback": _pairs_of(described.metavar or "", described.values.item)}
    elif kind is tuple and default is None:
        form["callback"] = _read_names
    elif kind is tuple:
        form |= {"multiple": True, "type": described.values.item}
    elif default == "auto" and kind is not str:
        form |= {"callback": _number_or_auto(kind), "metavar": described.metavar or "N|auto"}
    else:
        form["type"] = kind
    first = described.meaning[:1].upper().removeprefix("`")
    says = first + described.meaning[1:].replace("`", "").replace("None:", "none:") + "."
    if form.get("multiple"):
        says += " Can be given several times."
    shown = "on" if default is True else f"{default:g}" if isinstance(default, int | float) else default
    stands = [str(each) for each in (shown or None, described.means.replace("`", "")) if each]
    if stands and default is not False:
        says += f"  [default: {', '.join(stands)}]"
    return click.option(described.flag or f"--{name.replace('_', '-')}", name, help=says, **form)


def _parameters(section: type) -> list[Callable[..., Any]]:
    return [_parameter(name, described) for name, described in options_of(section).items() if described.flag != ""]


_CONFIG = click.option("--config", metavar="NAME|FILE", help=f"Preset ({', '.join(find_presets())}) or TOML file.")
_LOAD = [_CONFIG, *_parameters(DeviceConfig), *_parameters(SchedulerConfig)]
_GENERATION = _parameters(GenerationConfig)


def load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of loading a bundle."""
    return _apply(_LOAD, function)


def generation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a request."""
    return _apply(_GENERATION, function)


def prompt_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--prompts` and `--per-category`."""
    named = "default, grounded, long, open, or JSON Lines with 'turns' or 'prompt'.  [default: six built-in prompts]"
    few = "Use the first N prompts of each category."
    options = [
        click.option("--prompts", metavar="NAME|FILE", help=named),
        click.option("--per-category", type=click.IntRange(1), help=few),
    ]
    return _apply(options, function)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")(function)


def trace_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--trace`."""
    described = "Write a timeline, for ui.perfetto.dev."
    return click.option("--trace", metavar="FILE", callback=_check_trace, help=described)(function)


@contextmanager
def tracing(engine: Engine, trace: str | None) -> Iterator[None]:
    """Trace the block if a file was named, and print how to view the trace."""
    if trace is None:
        yield
        return
    with engine.trace(trace):
        yield
    err.print(f"Wrote {trace}: open it at https://ui.perfetto.dev, or: outrider trace {trace}")


def export_half(extra: str = "export") -> AbstractContextManager[None]:
    """A block that imports `outrider_export`. extra: has the packages that are needed.

    Raises:
        ExportError: when there is one missing.
    """
    return needs("The export half of outrider is not installed", extra, ExportError)


def read_options(options: dict[str, Any], *, max_new_tokens: int | None = None, measure: str = "auto") -> Config:
    """A config from `--config` and the given options, which win.

    max_new_tokens, measure: a command's defaults.
    """
    given = {name: without_word(name, value) for name, value in options.items() if value not in (None, ())}
    given.pop("config", None)
    if options.get("adapters") == ():  # none of them; other options have () where nothing was given
        given["adapters"] = ()
    config = load_config(options.get("config")).replace(**given)
    if config.generation.max_new_tokens is None:
        config = config.replace(max_new_tokens=max_new_tokens)
    return config.replace(measure=measure) if config.device.measure == "auto" else config


def _apply(decorators: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
