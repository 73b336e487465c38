"""`outrider verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench import describe
from outrider.cli.console import err, out, print_json, print_setting, progress_bar, table
from outrider.cli.inspect import check_files
from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import FiniteRange, export_half, json_option, load_options, prompt_options, read_options
from outrider.cli.progress import progress_line
from outrider.config import Config, GenerationConfig
from outrider.errors import OptionError, OutriderError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outrider.bundle.folder import Bundle
    from outrider.bundle.manifest import Format
    from outrider.engine.engine import Engine
    from outrider_bench.prompts import BenchPrompt
    from outrider_bench.verify.certify import CertifiedRuntime, Check
    from outrider_export.sources.source import Located
    from outrider_export.with_torch.fidelity import Fidelity


OWN_CHECKS = ("batching", "greedy", "coupled", "cancelled", "sampling")
CHECKS = (*OWN_CHECKS, "fidelity")
NUM_CANCELS = 24  # of the check cancelled


def _read_checks(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in CHECKS:
            raise click.BadParameter(f"There is no check '{name}'. {nearest(name, CHECKS)}")
    return names


@click.command()
@model_argument
@click.option(
    "--checks",
    metavar="NAME,…",
    callback=_read_checks,
    help=f"What to check: {', '.join(CHECKS)}.  [default: all; fidelity with --against]",
)
@click.option("--against", metavar="MODEL", help="Compare the main model's logits with this checkpoint's, in float32.")
@click.option("--draft-against", metavar="MODEL", help="The same for the draft model.")
@click.option("--min-cosine", type=FiniteRange(-1, 1), help="Fail where fidelity's median cosine is lower.")
@prompt_options
@click.option(
    "--max-new-tokens",
    type=click.IntRange(2),
    help="Length of each answer.  [default: 48, or half of a shorter context]",
)
@click.option(
    "--context",
    type=click.IntRange(64),
    help="Number of tokens that the check batching reads.  [default: 256, or what the context has room for]",
)
@click.option("--modes", help="Modes to compare with plain decoding, as draft:3,shuffled:8.  [default: all drafters]")
@click.option("--adapter", metavar="NAME", help="Certify texts with this adapter of the main model.")
@click.option("--peer", type=click.Choice(["openvino-genai"]), help="Run the same checks with another runtime.")
@load_options
@json_option
def verify(
    bundle: str,
    draft: str | None,
    checks: tuple[str, ...] | None,
    against: str | None,
    draft_against: str | None,
    min_cosine: float | None,
    prompts: str | None,
    per_category: int | None,
    max_new_tokens: int | None,
    context: int | None,
    modes: str | None,
    peer: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Check that drafts do not change MODEL's text on this machine.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id.

    First the sha256 of every file is compared with the manifest.

    batching: the logits of the same tokens, read in calls of different sizes, bit by bit. greedy, coupled: drafted text
    compared with plain decoding's, for every drafter, several draft lengths, and both chosen at random in every round.
    cancelled: answers after and beside cancelled ones compared with plain decoding's.
    sampling: the joint distribution of sampled tokens compared with the exact one, on a built-in toy pair; the distance
    of the lossy modes is only reported. A correct sampler fails one such test in 10,000. fidelity: cosine and most
    likely token of the logits, for prompts and answers, compared with the checkpoint (a hub id, a folder or a .gguf
    file) of the model; only reported, unless you give --min-cosine. The exit code is 1 if a check fails.
    """
    from outrider_bench.prompts import read_prompts
    from outrider_bench.verify.fitting import fit_answers

    if modes and "genai" in modes:
        raise OptionError("--modes takes Outrider's modes. Use --peer openvino-genai to check openvino-genai.")
    if options["adapter"] and (against or draft_against or peer):
        raise OptionError("--adapter cannot be combined with --against, --draft-against or --peer. Leave it out.")
    checkpoints = {role: name for role, name in (("main", against), ("draft", draft_against)) if name}
    asked, checks = checks, _choose_checks(checks, bool(checkpoints), min_cosine)
    config = read_options(options, measure="first")
    chosen = read_prompts(prompts, per_category)
    opened = open_model(bundle, draft, quiet=as_json, config=config)
    check_files(opened, quiet=as_json)  # a load checks the sizes of weights only
    if "fidelity" in checks:
        fetched = fetch_checkpoints(opened, config, checkpoints, quiet=as_json)
    engine = load_model(opened, config)
    max_new_tokens = max_new_tokens or fit_answers(engine)
    if {"greedy", "coupled", "cancelled", "fidelity"} & set(checks):
        chosen = _fit(engine, chosen, max_new_tokens, quiet=as_json)
    run = _Certifying(engine, chosen, max_new_tokens, peer, as_json)
    subjects = run.subjects(modes) if {"greedy", "coupled"} & set(checks) else []
    made = run.batching(context, is_asked=asked is not None) if "batching" in checks else []
    for subject in subjects:
        made += run.identity(subject, checks)
    made += run.cancelled() if "cancelled" in checks else []
    made += run.sampling() if "sampling" in checks else []
    if "fidelity" in checks:
        made += check_fidelity(engine, fetched, chosen, max_new_tokens, min_cosine, quiet=as_json)
    _report(made, describe(engine, max_new_tokens, 1), as_json)


def _fit(engine: Engine, prompts: list[BenchPrompt], max_new_tokens: int, *, quiet: bool) -> list[BenchPrompt]:
    """Prompts that fit in the context with their answers. Says how many are cut."""
    from outrider_bench.verify.fitting import fit_prompts

    fitted, num_cut = fit_prompts(engine, prompts, max_new_tokens)
    if num_cut and not quiet:
        room = f"the context of {engine.max_tokens:,} tokens has no room for them"
        err.print(f"{num_cut} of {len(fitted)} prompts are cut, as {room} and an answer of {max_new_tokens:,}.")
    return fitted


@dataclass(frozen=True)
class _Certifying:
    """Makes the checks, and shows how far they are. peer: a runtime that is checked, too."""

    engine: Engine
    prompts: list[BenchPrompt]
    max_new_tokens: int
    peer: str | None
    quiet: bool

    def subjects(self, modes: str | None) -> list[CertifiedRuntime]:
        """The runtimes whose texts are compared, ours with these modes."""
        from outrider_bench.verify import certify

        ours = certify.our_subject(self.engine, [name.strip() for name in modes.split(",")] if modes else [])
        return [ours, certify.genai_subject(self.engine)] if self.peer else [ours]

    def batching(self, context: int | None, *, is_asked: bool) -> list[Check]:
        """The same tokens in calls of different sizes. is_asked: an error if there is no room, in place of a remark."""
        from outrider_bench.verify import certify
        from outrider_bench.verify.fitting import fit_context

        fitted = fit_context(self.engine, context)
        if fitted is None:
            room = f"the context of {self.engine.max_tokens:,} tokens, or the cache, has no room for what it reads"
            if is_asked:
                raise OptionError(f"--checks batching cannot be made: {room}. Leave it out, or raise --cache-size.")
            return [certify.Check("batch invariance", None, f"left out: {room}")]
        with progress_line(f"Reading {fitted:,} tokens in several ways.", quiet=self.quiet):
            main = certify.main_of(self.engine)
            made = [certify.check_batching(main, fitted)]
            return [*made, certify.check_states(main, fitted)] if self.engine.main.capabilities.states else made

    def identity(self, subject: CertifiedRuntime, checks: tuple[str, ...]) -> list[Check]:
        """Every prompt in every mode, compared with plain decoding: once greedily, with two seeds if sampled."""
        from outrider_bench.verify import certify

        known = {"greedy": (1, certify.check_greedy), "coupled": (2, certify.check_coupled)}
        asked = [known[name] for name in checks if name in known]
        runs = len(self.prompts) * len(subject.modes) * sum(times for times, _ in asked)
        with progress_bar(f"answers compared, {subject.name}", runs, quiet=self.quiet) as advance:
            return [check(subject, self.engine, self.prompts, self.max_new_tokens, advance) for _, check in asked]

    def cancelled(self) -> list[Check]:
        """Answers after and beside cancelled ones."""
        from outrider_bench.verify import certify

        with progress_bar("answers cancelled", NUM_CANCELS, quiet=self.quiet) as advance:
            return [certify.check_cancelled(self.engine, self.prompts, NUM_CANCELS, self.max_new_tokens, advance)]

    def sampling(self) -> list[Check]:
        """The joint distribution of sampled tokens, on the toy pair."""
        from outrider_bench.verify import certify

        tokenizer = self.engine.bundle.tokenizer_path if self.peer else None
        with (
            progress_line("Sampling from a built-in toy pair, thousands of answers.", quiet=self.quiet),
            certify.toy_engine(self.engine.config, _toy_formats(self.engine, self.peer), tokenizer) as toy,
        ):
            return certify.check_our_sampling(toy) + (certify.check_genai_sampling(toy) if self.peer else [])


def _report(made: list[Check], setting: dict[str, Any], as_json: bool) -> None:
    """Show the checks. Raises OutriderError if one of ours failed."""
    failed = [check.name for check in made if check.passed is False and check.subject == "outrider"]
    if as_json:
        print_json({"passed": not failed, "setting": setting, "checks": [asdict(check) for check in made]})
    else:
        print_setting(setting)
        _print(made)
    if failed:
        raise OutriderError(f"These checks failed on this machine: {', '.join(failed)}.")
    if not as_json:
        out.print("\nAll promises held on this machine.", style="green")


def _choose_checks(checks: tuple[str, ...] | None, has_checkpoint: bool, min_cosine: float | None) -> tuple[str, ...]:
    if checks is None:
        checks = CHECKS if has_checkpoint else OWN_CHECKS
    if "fidelity" in checks and not has_checkpoint:
        raise OptionError(
            "The check 'fidelity' needs the checkpoint to compare with: add --against or --draft-against."
        )
    if "fidelity" not in checks and (has_checkpoint or min_cosine is not None):
        raise OptionError(
            "--against, --draft-against and --min-cosine are for the check 'fidelity'"
            + (", and --checks leaves it out. Add it there." if has_checkpoint else ": add --against.")
        )
    return checks


def _toy_formats(engine: Engine, peer: str | None) -> tuple[Format, Format]:
    """The formats of the built-in pair: those of the certified models, if these can be written."""
    main, *drafts = (model.format for model in engine.models.values())
    formats = (main, drafts[0] if drafts else main)
    if "onnx" in formats and (peer or find_spec("onnx") is None):
        why = "openvino-genai has no other" if peer else "writing it in ONNX needs the package onnx"
        err.print(f"The sampling check's own pair runs on OpenVINO, as {why}.")
        return "openvino", "openvino"
    return formats


def _print(checks: list[Check]) -> None:
    several = len({check.subject for check in checks}) > 1
    made = table(*(["runtime"] if several else []), "check", "result", "detail", text=3)
    for check in checks:
        result = {True: "passed", False: "FAILED", None: "no promise"}[check.passed]
        made.add_row(*([check.subject] if several else []), check.name, result, check.detail)
    out.print(made)


def fetch_checkpoints(
    bundle: Bundle, config: Config, checkpoints: Mapping[str, str], *, quiet: bool
) -> dict[str, Located]:
    """Find the checkpoints by their names, by role. Called before models are loaded, which takes longer.

    Raises:
        OptionError: for a model that is not there.
        ExportError: when a checkpoint is not there, or the export half is not installed.
    """
    with export_half():
        from outrider_export.with_torch.fidelity import fetch_checkpoint, find_holder
    progress = _Steps(lambda: None, quiet)
    for role in checkpoints:
        find_holder(bundle, role, config)
    return {role: fetch_checkpoint(role, name, progress) for role, name in checkpoints.items()}


def check_fidelity(
    engine: Engine,
    checkpoints: Mapping[str, Located],
    prompts: list[BenchPrompt],
    max_new_tokens: int,
    min_cosine: float | None,
    *,
    quiet: bool,
) -> list[Check]:
    """One check per role of `checkpoints`: compares its model's logits for prompts and the main model's answers.

    Raises:
        ExportError: when a checkpoint cannot be read.
    """
    from outrider_export.with_torch.fidelity import compare_with_checkpoint

    with progress_bar("answering", len(prompts), quiet=quiet) as advance:
        texts = []
        for prompt in prompts:
            token_ids = engine.tokenizer.encode_prompt(prompt.text)
            answer = engine.generate(token_ids, GenerationConfig(max_new_tokens=max_new_tokens))
            texts.append([*token_ids, *answer.token_ids])
            advance()
    checks = []
    for role, checkpoint in checkpoints.items():
        with progress_bar(f"comparing {role}", len(texts), quiet=quiet) as advance:
            found = compare_with_checkpoint(
                engine.bundle, role, checkpoint, texts, engine.config, progress=_Steps(advance, quiet)
            )
        checks.append(_check_cosine(role, found, min_cosine))
    return checks


def _check_cosine(role: str, found: Fidelity, min_cosine: float | None) -> Check:
    """How close a model is to the checkpoint that it came from.

    role: "main" or a drafter's name. min_cosine: the least median that passes; None: report only.
    """
    from outrider_bench.verify.certify import Check

    detail = (
        f"{found.setting}, against {found.checkpoint} in float32, {found.num_rows:,} rows: cosine median "
        f"{found.median:.5f}, first percentile {found.first_percentile:.5f}, minimum {found.minimum:.5f}; the same "
        f"token on top in {found.top1_agreement:.1%}"
    )
    passed = None if min_cosine is None else found.median >= min_cosine
    if min_cosine is not None:
        detail += f"; fails where the median is below {min_cosine:g}"
    return Check(f"fidelity, {role} model", passed, detail, asdict(found))


class _Steps:
    """A `Progress` of outrider_export for a bar that counts texts."""

    def __init__(self, advance: Callable[[], None], quiet: bool) -> None:
        self._advance = advance
        self._quiet = quiet

    def phase(self, name: str, total: int | None = None) -> None:
        """The bar has one phase."""

    def advance(self, count: int) -> None:
        for _ in range(count):
            self._advance()

    def note(self, text: str) -> None:
        if not self._quiet:
            err.print(text)
