"""Options that several commands share; their names are those of `outrider.config`."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.console import err
from outrider.config.files import find_presets, load_config, user_path
from outrider.errors import OptionError
from outrider.system.files import shown, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.config import Config
    from outrider.engine.engine import Engine


class FiniteRange(click.FloatRange):
    """A range of numbers, without "nan", which is above no limit and below none, and "inf"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def _read_biases(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, float] | None:
    """A table from ID=VALUE pairs; None without pairs."""
    biases = {}
    for pair in given:
        token_id, _, value = pair.partition("=")
        if token_id in biases:
            raise click.BadParameter(f"'{pair}' is the second value for token {token_id}.", context, parameter)
        try:
            biases[token_id] = float(value)
        except ValueError as error:
            raise click.BadParameter(f"'{pair}' is not ID=VALUE, such as 50256=-100.", context, parameter) from error
    return biases or None


def _read_properties(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, str] | None:
    """A table from NAME=VALUE pairs; None without pairs."""
    properties: dict[str, str] = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not name or not sign:
            raise click.BadParameter(f"'{pair}' is not NAME=VALUE, such as ENABLE_CPU_PINNING=NO.", context, parameter)
        if name in properties:
            raise click.BadParameter(f"'{pair}' is the second value for {name}.", context, parameter)
        properties[name] = value
    return properties or None


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


_LOAD = [
    click.option("--config", metavar="NAME|FILE", help=f"Preset ({', '.join(find_presets())}) or TOML file."),
    click.option(
        "--main-device", metavar="DEVICE", help="Main model's device; auto: a GPU if one works.  [default: CPU]"
    ),
    click.option("--draft-device", metavar="DEVICE", help="The same of the draft model.  [default: the main device]"),
    click.option("--draft-bundle", metavar="FOLDER", help="Draft with another bundle's models, in any format."),
    click.option(
        "--adapters",
        metavar="NAME,…",
        callback=_read_names,
        help="LoRA adapters to load; none for none.  [default: all of the bundle's]",
    ),
    click.option("--precision", metavar="TYPE", help="Calculate in auto, f32, bf16 or f16."),
    click.option("--cache-precision", metavar="TYPE", help="Store keys and values in auto, f32, bf16, f16 or u8."),
    click.option(
        "--top-logits",
        metavar="N|auto",
        callback=_number_or_auto(int),
        help="Logits per row that OpenVINO's device picks out; 0 is off.  [default: auto, 0 on CPU]",
    ),
    click.option("--num-threads", type=int, help="CPU threads."),
    click.option("--draft-num-threads", type=int, help="CPU threads of the draft model.  [default: the same]"),
    *(
        click.option(
            f"--{role}property",
            f"{role.replace('-', '_')}properties",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_read_properties,
            help=f"Of OpenVINO or ONNX Runtime, for {whom}. Several times.",
        )
        for role, whom in (("", "both models"), ("main-", "the main model"), ("draft-", "the draft model"))
    ),
    click.option(
        "--compiled-cache", metavar="FOLDER", help="Folder for compiled models; auto or off.  [default: auto]"
    ),
    click.option("--npu-max-prompt-tokens", type=int, help="That models on an NPU are compiled for.  [default: 1024]"),
    click.option("--npu-max-new-tokens", type=int, help="The same, of an answer.  [default: 512]"),
    click.option("--npu-window", type=int, help="Rows of a main model's call there.  [default: a draft's, and one]"),
    click.option("--cache-size", type=float, help="GB for keys and values.  [default: 2]"),
    click.option(
        "--enable-prefix-caching",
        type=click.Choice(["on", "off"]),
        callback=_read_switch,
        help="Reuse the KV cache for prompts that begin alike.  [default: on; off in measurements]",
    ),
    click.option("--max-num-batched-tokens", type=int, help="Tokens that one call reads.  [default: 512]"),
    click.option(
        "--max-round-seconds",
        metavar="SECONDS|auto",
        callback=_number_or_auto(float),
        help="Of a round that reads prompts beside answers.  [default: auto]",
    ),
    click.option(
        "--overlap",
        type=click.Choice(["auto", "on", "off"]),
        callback=_read_switch,
        help="Draft during target passes.  [default: auto, if it pays]",
    ),
    click.option("--image-memory", type=float, help="GB to decode an image in, one at a time.  [default: 0.5]"),
    click.option("--answer-store", metavar="FILE", help="Save answers here, unencrypted, to copy from."),
]

_GENERATION = [
    click.option("--max-new-tokens", type=int, help="Longest answer.  [default: 512]"),
    click.option("--drafter", metavar="NAME", help="auto, draft, ngram, suffix or none.  [default: auto]"),
    click.option("--adapter", metavar="NAME", help="One of the bundle's LoRA adapters, or none.  [default: none]"),
    click.option(
        "--num-assistant-tokens",
        metavar="N|auto",
        callback=_number_or_auto(int),
        help="Draft tokens a round; 0 is plain decoding.  [default: auto, as many as pay]",
    ),
    click.option("--assistant-confidence-threshold", type=float, help="End a draft behind a token less sure."),
    click.option("--max-ngram-size", type=int, help="Tokens that n-gram drafting matches at most.  [default: 3]"),
    click.option("--temperature", type=float, help="0 is greedy.  [default: 0]"),
    click.option(
        "--sampling",
        metavar="MODE",
        help="coupled (one text a seed), rejection, token-rejection; lossy: threshold, typical.  [default: coupled]",
    ),
    click.option("--acceptance-threshold", type=float, help="Of the lossy modes.  [default: 0.5 and 0.09]"),
    click.option("--top-k", type=int, help="Sample from the k likeliest tokens."),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens that make up p."),
    click.option("--min-p", type=float, help="Sample from tokens of at least this share of the likeliest one."),
    click.option("--typical-p", type=float, help="Sample from the tokens nearest to the entropy that make up p."),
    click.option("--repetition-penalty", type=float, help="Over prompt and answer; 1 is off."),
    click.option("--presence-penalty", type=float, help="Over the answer; 0 is off."),
    click.option("--frequency-penalty", type=float, help="Over the answer; 0 is off."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=_read_biases,
        help="Add this to a token's logit, -100 to 100. Can be given several times.",
    ),
    click.option("--no-repeat-ngram-size", type=int, help="Let no n tokens in a row come twice; 0 is off."),
    click.option("--banned-token-ids", type=int, multiple=True, metavar="ID", help="Never choose it. Several times."),
    click.option("--min-new-tokens", type=int, help="Shortest answer, unless a stop string ends it."),
    click.option("--seed", type=int, help="Makes sampling repeatable."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer here. Can be given several times."),
    click.option("--stop-token-ids", type=int, multiple=True, metavar="ID", help="The same, by token id."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end of the answer."),
    click.option("--logprobs", type=int, help="How likely each token was, and this many of the likeliest."),
    click.option("--logprobs-of", metavar="KIND", help="unprocessed or processed logits.  [default: unprocessed]"),
]


def load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of loading a bundle."""
    return _apply(_LOAD, function)


def generation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a request."""
    return _apply(_GENERATION, function)


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


def read_options(options: dict[str, Any], *, max_new_tokens: int | None = None) -> Config:
    """A config from `--config` and the given options, which win.

    max_new_tokens: a command's default.
    """
    given = {name: value for name, value in options.items() if name != "config" and value not in (None, ())}
    if options.get("adapters") == ():  # none of them; other options have () where nothing was given
        given["adapters"] = ()
    for name in ("drafter", "adapter"):
        if given.get(name) == "none":
            given[name] = None
    config = load_config(options.get("config")).replace(**given)
    if config.generation.max_new_tokens is None:
        config = config.replace(max_new_tokens=max_new_tokens)
    return config


def _apply(decorators: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
