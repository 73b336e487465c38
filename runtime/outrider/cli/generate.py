"""`outrider generate`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.console import out, print_json, table
from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import generation_options, json_option, load_options, read_options, trace_option, tracing
from outrider.cli.progress import progress_line, reading_shown
from outrider.cli.words import Words, visible
from outrider.config.files import user_path
from outrider.system.files import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from outrider.decoding.metrics import Stats
    from outrider.decoding.results import Result, TextChunk
    from outrider.engine.engine import Engine


@click.command()
@model_argument
@click.argument("prompt")
@click.option("--system", metavar="TEXT", help="System message before the prompt.")
@click.option("--image", multiple=True, metavar="FILE", help="An image before the prompt. Can be given several times.")
@click.option("--no-chat-template", is_flag=True, help="Use the prompt without the chat template.")
@click.option(
    "--reference",
    multiple=True,
    metavar="FILE",
    help="A text that the drafters auto and suffix copy from. Can be given several times.",
)
@click.option("--json-schema", metavar="FILE", help="Answer in JSON by the schema in this file.")
@click.option("--regex", metavar="PATTERN", help="Answer with a text that matches this regular expression.")
@click.option("--grammar", metavar="FILE", help="Answer by the grammar in this file, in Lark or GBNF.")
@click.option("--compare", is_flag=True, help="Run the request a second time without drafts, and print both speeds.")
@trace_option
@load_options
@generation_options
@json_option
def generate(
    bundle: str,
    draft: str | None,
    prompt: str,
    system: str | None,
    image: tuple[str, ...],
    no_chat_template: bool,
    reference: tuple[str, ...],
    json_schema: str | None,
    regex: str | None,
    grammar: str | None,
    compare: bool,
    trace: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id. A PROMPT of "-" is read from standard input.
    """
    config = read_options(options, measure="first" if compare else "auto")
    if reference:
        config = config.replace(references=[_read_text("Reference", path) for path in reference])
    shapes = {
        "json_schema": json_schema and _read_text("JSON schema", json_schema),
        "regex": regex,
        "grammar": grammar and _read_text("Grammar", grammar),
    }
    config = config.replace(**{name: text for name, text in shapes.items() if text is not None})
    request = _request(prompt, system, image, chat_template=not no_chat_template)
    if compare and (config.generation.drafter is None or config.generation.num_assistant_tokens == 0):
        raise click.UsageError("--compare compares with plain decoding, and this request is plain: choose a drafter.")
    if config.generation.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: add it, or leave --logprobs out.")
    arguments: dict[str, Any] = {"chat_template": not no_chat_template}
    if compare:  # both runs read the whole prompt
        config = config.replace(enable_prefix_caching=False)
    if config.device.adapters is None:  # what the request does not need would make it slower
        adapter = config.generation.adapter
        config = config.replace(adapters=() if adapter is None else (adapter,))
    engine = load_model(open_model(bundle, draft, quiet=as_json, config=config, main_first=not compare), config)
    if compare:
        few = min(config.generation.max_new_tokens or 16, 16)
        warm_up(engine, request, config.generation.drafter, max_new_tokens=few, min_new_tokens=0, **arguments)

    with tracing(engine, trace):
        if as_json:
            result = engine.generate(request, **arguments)
        else:
            result = print_stream(reading_shown(engine.stream(request, prompt_progress=True, **arguments)))
        plain = engine.generate(request, **arguments, drafter=None, seed=result.seed) if compare else None
    if as_json:
        print_json(result.as_dict() | ({"compare": compare_as_dict(result, plain)} if plain else {}))
    elif plain:
        out.print()
        out.print(comparison(result, plain))
        out.print(verdict(result, plain, config.generation.sampling))
    _learn(engine)


def _learn(engine: Engine) -> None:
    """Learn from the whole answer: whoever reads it need not wait, and Ctrl-C ends no more than this."""
    sys.stdout.flush()
    line = progress_line("Drafting the answer again, to know how many draft tokens are accepted.", quiet=True)
    with contextlib.suppress(KeyboardInterrupt), line:
        engine.learn()


def _request(prompt: str, system: str | None, images: tuple[str, ...], *, chat_template: bool) -> Any:
    """What the engine answers: the prompt, with what comes before it as messages."""
    for option, value in (("--system", system), ("--image", images)):
        if value not in (None, ()) and not chat_template:
            raise click.UsageError(f"{option} needs the chat template: leave out --no-chat-template.")
    text = sys.stdin.read() if prompt == "-" else prompt
    if system is None and not images:
        return text
    seen = [{"type": "image", "image": path} for path in images]
    content = [*seen, {"type": "text", "text": text}] if seen else text
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": content}]


def _read_text(what: str, path: str) -> str:
    with reading(f"{what} {path}", "Name a text file, in UTF-8."):
        return user_path(path).read_text(encoding="utf-8-sig")


def warm_up(engine: Engine, prompt: Any, drafter: str | None, **options: Any) -> None:
    """Run both ways once, because the first call of each shape compiles kernels."""
    for each in (drafter, None):
        engine.generate(prompt, drafter=each, **options)


def print_stream(chunks: Iterator[TextChunk]) -> Result:
    """Print text while it streams, and return the whole answer. A terminal's lines end between words."""
    is_terminal = sys.stdout.isatty()
    words = Words(lambda text, _: sys.stdout.write(text), out.width if is_terminal else None)
    result: Result | None = None
    try:
        for chunk in chunks:
            words.push(visible(chunk.text) if is_terminal else chunk.text, None)
            sys.stdout.flush()
            result = chunk.result
    finally:
        words.close()
        sys.stdout.write("\n")
    if result is None:
        raise AssertionError("a stream ends with a result")
    return result


def speed_up(result: Result, plain: Result) -> float:
    """Decoded tokens per second / plain decoding's; 1 if nothing was decoded."""
    slow = plain.stats.tokens_per_second
    return result.stats.tokens_per_second / slow if slow else 1.0


def compare_as_dict(result: Result, plain: Result) -> dict[str, Any]:
    """Plain decoding beside the result, for JSON."""
    return {
        "identical": result.token_ids == plain.token_ids,
        "speed_up": speed_up(result, plain),
        "plain": plain.as_dict(),
    }


def comparison(result: Result, plain: Result) -> Table:
    """Both runs side by side."""
    made = table("", "plain", "speculative")
    rows: dict[str, Callable[[Stats], str]] = {
        "tokens per second": lambda s: f"{s.tokens_per_second:.1f}",
        "time to first token": lambda s: f"{s.time_to_first_token * 1e3:.0f} ms",
        "tokens per round": lambda s: f"{s.tokens_per_round:.2f}",
        "draft tokens": lambda s: f"{s.num_draft_tokens}",
        "accepted": lambda s: f"{s.num_accepted_tokens}",
        "acceptance rate": lambda s: f"{s.acceptance_rate:.0%}" if s.num_draft_tokens else "-",
        "drafting": lambda s: f"{s.draft_seconds:.2f} s",
        "target passes": lambda s: f"{s.check_seconds:.2f} s",
        "on the host": lambda s: f"{s.host_seconds:.2f} s",
    }
    for label, row in rows.items():
        made.add_row(label, row(plain.stats), row(result.stats))
    return made


def verdict(result: Result, plain: Result, sampling: str = "coupled") -> str:
    """One line: whether the text is the same, and the speed-up."""
    times = f"{speed_up(result, plain):.2f}× the speed of plain decoding"
    if result.token_ids == plain.token_ids:
        return f"The same {len(plain.token_ids)} tokens, at {times}."
    if not result.lossless:
        return (
            f"sampling='{sampling}' is LOSSY, so the text is not the main model's; {times}. Plain text:\n{plain.text}"
        )
    if result.seed is not None and sampling != "coupled":
        return f"Rejection sampling gives other texts of the same distribution; {times}. Plain text:\n{plain.text}"
    at = next((i for i, (a, b) in enumerate(zip(result.token_ids, plain.token_ids, strict=False)) if a != b), 0)
    return f"The texts differ from token {at} on; {times}. Plain text:\n{plain.text}"
