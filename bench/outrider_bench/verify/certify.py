"""The certificate: checks of a runtime's promises about its output, on this device with these models.

A subject is a runtime with its plain decoding and its speculative modes. The same code checks ours and
openvino-genai's.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from outrider.bundle.kinds import COPYING
from outrider.bundle.manifest import Format
from outrider.config import Config, GenerationConfig, format_of_property
from outrider.engine.engine import Engine
from outrider.inputs.audio import log_mel
from outrider.models.cost.slots import Adapted
from outrider.models.tuning.measure.readings import compare_readings, compare_states, read
from outrider.testing import ToyTokenizer, save_toy_bundle
from outrider.types import Backend, EncoderSource
from outrider.types import Prompt as Input
from outrider_bench.modes.make import make_modes
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt
from outrider_bench.verify.cancelled import cancel_and_compare, known_answers
from outrider_bench.verify.exact import chi_square_p_value, exact_joint, expected_total_variation, total_variation

FALSE_ALARM = 1e-4  # the chance that a correct sampler fails one chi-square test
LENGTHS = (1, 3, 8)  # draft tokens per round
COUPLED = {"temperature": 0.7, "top_p": 0.9, "sampling": "coupled"}
TOY_PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
TOY_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
_CANCELLED_TOKENS = 32  # at most, of answers, those after cancelled ones included
NUM_TOKENS = 3  # of the joint distribution of the sampling checks
NUM_SAMPLES = 2000
LOSSY_THRESHOLDS = {"threshold": (1.0, 0.5, 0.1), "typical": (0.3, 0.09)}


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a promise, in words and in figures. passed: None if nothing is promised."""

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    subject: str = "outrider"


@dataclass(frozen=True, slots=True)
class CertifiedRuntime:
    """A runtime: plain decoding, and the modes that must not differ from it."""

    plain: Mode
    modes: Sequence[Mode]

    @property
    def name(self) -> str:
        """The runtime's name."""
        return self.plain.runtime


def our_subject(engine: Engine, modes: Sequence[str] = ()) -> CertifiedRuntime:
    """Outrider: these modes, or every drafter at several lengths, and drafter and length at random every round."""
    loaded = [name for name in engine.bundled_drafters if name in engine.drafters]
    own = [f"{drafter}:{length}" for drafter in (*loaded, *COPYING) for length in LENGTHS]
    plain, *made = make_modes(["plain", *(modes or [*own, "auto", "shuffled:8", "shuffled:3"])], engine)
    return CertifiedRuntime(plain, made)


def genai_subject(engine: Engine) -> CertifiedRuntime:
    """openvino-genai on the same files: draft model, if there is one, and prompt lookup."""
    same = [
        drafter
        for drafter in Setup(engine.bundle, engine.config).draft_models
        if drafter.vocabulary == "same" and not drafter.num_proposed_tokens and drafter.model.format == "openvino"
    ]
    kinds = ("genai-draft", "genai-ngram") if same else ("genai-ngram",)
    plain, *modes = make_modes(["genai", *(f"{kind}:{length}" for kind in kinds for length in LENGTHS)], engine)
    return CertifiedRuntime(plain, modes)


def main_of(engine: Engine) -> Backend:
    """An engine's main model, with the engine's adapter if it has one. Not while requests run."""
    adapter = engine.config.generation.adapter
    return engine.main if adapter is None else cast("Backend", Adapted(engine.main, adapter))


def check_batching(main: Backend, context: int) -> Check:
    """Whether logits have the same bits in any batch; see `outrider.models.tuning.measure.exactness`."""
    return _same_bits("batch invariance", compare_readings(main, context), context)


def check_states(main: Backend, context: int) -> Check:
    """Whether a sequence that goes on from a stored state has the bits of one that was read at once."""
    return _same_bits("states", compare_states(main, context), context)


def _same_bits(name: str, differences: dict[str, float], context: int) -> Check:
    worst = max(differences, key=lambda name: differences[name])
    passed = differences[worst] == 0
    detail = f"{len(differences)} ways to read {context:,} tokens: " + (
        "bit-identical" if passed else f"logits differ by up to {differences[worst]:.3g}: {worst}"
    )
    return Check(name, passed, detail, {"context": context, "largest_difference": differences})


def check_cancelled(
    engine: Engine, prompts: Sequence[BenchPrompt], num_cancels: int, max_new_tokens: int, advance: Callable[[], None]
) -> Check:
    """Whether answers after cancelled ones are those of plain decoding. advance: called after each of `num_cancels`."""
    options = {"max_new_tokens": min(_CANCELLED_TOKENS, max_new_tokens), "adapter": engine.config.generation.adapter}
    known = known_answers(engine, [_encode(engine, prompt) for prompt in prompts], **options)
    loaded = [name for name in engine.bundled_drafters if name in engine.drafters]
    drafters = [*loaded, *COPYING, "auto", None]
    wrong = cancel_and_compare(engine, known, drafters, num_cancels, 0, advance, **options)
    detail = f"{num_cancels} answers cancelled at random moments: "
    if not wrong:
        detail += "those after and beside them are plain decoding's"
    else:
        first = wrong[0]
        detail += (
            f"{len(wrong)} after or beside them were wrong, first that of {prompts[first.prompt].id}, {first.after}"
        )
    figures = {"num_cancels": num_cancels, "wrong": [asdict(each) for each in wrong]}
    return Check("cancelled answers leave no trace", not wrong, detail, figures)


def _check_identity(
    name: str,
    settings: Sequence[dict[str, Any]],
    subject: CertifiedRuntime,
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    advance: Callable[[], None],
) -> Check:
    """Whether the text of every mode is that of plain decoding. settings: generation options, each for all prompts.

    advance: called after each run, so len(subject.modes) times for each prompt and setting.
    """
    adapter = engine.config.generation.adapter
    jobs: list[_Job] = []
    encoded = [(prompt, _encode(engine, prompt)) for prompt in prompts]
    for options in settings:
        config = GenerationConfig(max_new_tokens=max_new_tokens, adapter=adapter, **options)
        for prompt, token_ids in encoded:
            plain = _run(subject.plain, token_ids, config).token_ids
            jobs += [_Job(prompt, token_ids, config, plain, mode) for mode in subject.modes]
    runs = []
    for run in _in_parallel(subject.plain.num_parallel, [job.run for job in jobs]):
        runs.append(run)
        advance()
    num_drafted = sum(run.stats.get("num_draft_tokens", 0) for run in runs)
    differing = [
        {"prompt": job.prompt.id, "mode": job.mode.name, "seed": job.config.seed}
        | _first_difference(engine, job.token_ids, job.plain, run.token_ids)
        for job, run in zip(jobs, runs, strict=True)
        if run.token_ids != job.plain
    ]
    detail = f"{len(jobs) - len(differing)} of {len(jobs)} runs identical to plain decoding"
    if num_drafted:
        detail += f", {num_drafted:,} tokens drafted"
    if differing:
        first = differing[0]
        detail += f"; first at token {first['position']} of {first['prompt']}, logit gap {first['logit_gap']:.3g}"
    return Check(name, not differing, detail, {"num_runs": len(jobs), "differing": differing}, subject.name)


check_greedy = partial(_check_identity, "greedy identity", [{}])
check_coupled = partial(_check_identity, "coupled identity", [COUPLED | {"seed": seed} for seed in (0, 1)])


def _encode(engine: Engine, prompt: BenchPrompt) -> list[int] | Input:
    """The input of a mode: the prompt's tokens, for an encoder cut to its context.

    Audio models get noise, seeded by the prompt's id: answers are only compared with each other.
    """
    encoder = engine.bundle.manifest.main.encoder
    if encoder is None or encoder.audio is None:
        token_ids = engine.tokenizer.encode_prompt(prompt.text)
        return token_ids if encoder is None else token_ids[: encoder.context_length]
    audio = encoder.audio
    rng = np.random.default_rng([*prompt.id.encode()])
    seconds = audio.chunk_seconds * audio.sampling_rate
    features = log_mel(
        rng.normal(scale=0.1, size=seconds).astype(np.float32),
        num_mel_bins=audio.num_mel_bins,
        sampling_rate=audio.sampling_rate,
        window_length=audio.window_length,
        hop_length=audio.hop_length,
    )
    begin = [*encoder.begin_token_ids, *list(audio.languages.values())[:1], *list(audio.tasks.values())[:1]]
    return Input([*begin, audio.no_timestamps_token_id], source=EncoderSource.of_audio(features))


def _run(mode: Mode, prompt: list[int] | Input, config: GenerationConfig) -> Run:
    """Run a prompt in a mode. Only our own modes are made for models that read audio."""
    return mode.run(cast("list[int]", prompt), config)


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt to run in a mode, with the result of plain decoding alone."""

    prompt: BenchPrompt
    token_ids: list[int] | Input
    config: GenerationConfig
    plain: list[int]
    mode: Mode

    def run(self) -> Run:
        return _run(self.mode, self.token_ids, self.config)


def _in_parallel(num_parallel: int, runs: Sequence[Callable[[], Run]]) -> Iterator[Run]:
    """The runs, in order. Ours run together, so that batches are checked, too."""
    pool = ThreadPoolExecutor(num_parallel)
    try:
        yield from pool.map(lambda run: run(), runs)
    finally:
        pool.shutdown(cancel_futures=True)


def _first_difference(engine: Engine, prompt: list[int] | Input, plain: list[int], other: list[int]) -> dict[str, Any]:
    """The position where two answers begin to differ, and the difference of the main model's logits there."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    gap = 0.0
    if at < min(len(plain), len(other)):
        encoder = engine.bundle.manifest.main.encoder
        if isinstance(prompt, Input):
            begin, source = list(prompt.token_ids), prompt.source
        elif encoder is not None:
            begin, source = list(encoder.begin_token_ids), EncoderSource.of_text(prompt)
        else:
            begin, source = prompt, None
        context = [*begin, *plain[:at]]
        logits = read(main_of(engine), context, [len(context)], 1, source)[-1]
        gap = abs(float(logits[plain[at]] - logits[other[at]]))
    return {"position": at, "logit_gap": gap}


def check_sampling(
    mode: Mode,
    exact: Mapping[tuple[int, ...], float],
    num_samples: int,
    name: str,
    *,
    lossy: bool = False,
    **options: Any,
) -> Check:
    """Whether a mode's samples have the main model's distribution, on a toy pair (`toy_engine`).

    Compares the first tokens of many answers with their joint distribution, `exact`. A lossy mode's distance is
    reported and never fails.
    """
    config = GenerationConfig(max_new_tokens=NUM_TOKENS + 2, **TOY_SAMPLING, **options)
    answers: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    runs = [partial(mode.run, TOY_PROMPT, config.replace(seed=seed)) for seed in range(num_samples)]
    for run in _in_parallel(mode.num_parallel, runs):
        answers[tuple(run.token_ids[:NUM_TOKENS])] += 1
        accepted += run.stats.get("num_accepted_tokens", 0)
        drafted += run.stats.get("num_draft_tokens", 0)
    p_value, distance = chi_square_p_value(answers, exact), total_variation(answers, exact)
    expected = expected_total_variation(exact, num_samples)
    detail = f"total variation {distance:.3f}, where exact samples give {expected:.3f}"
    if not lossy:
        detail += f"; chi-square p = {p_value:.2g} (fails below {FALSE_ALARM:g})"
    if drafted:
        detail += f"; {accepted / drafted:.0%} of {drafted:,} draft tokens accepted"
    figures: dict[str, float | None] = {
        "total_variation": distance,
        "expected_total_variation": expected,
        "p_value": p_value,
        "num_samples": num_samples,
        "acceptance_rate": accepted / drafted if drafted else None,
    }
    passed = None if lossy else p_value > FALSE_ALARM
    return Check(name, passed, detail, figures, mode.runtime)


def _toy_joint(toy: Engine) -> dict[tuple[int, ...], float]:
    """The main model's exact joint distribution after the toy prompt, the same for every mode."""
    return exact_joint(toy, TOY_PROMPT, GenerationConfig(**TOY_SAMPLING), NUM_TOKENS)


def check_our_sampling(toy: Engine, num_samples: int = NUM_SAMPLES) -> list[Check]:
    """Our sampling modes: the lossless ones, with drafts of three and of random lengths, then the lossy ones."""
    one, draft, shuffled = make_modes(["draft:1", "draft:3", "shuffled:3"], toy)
    exact = _toy_joint(toy)
    # With drafts of three, the bonus token is not among the compared tokens; with drafts of one, it is.
    checks = [
        check_sampling(mode, exact, num_samples, f"{sampling} sampling, {mode.name}", sampling=sampling)
        for sampling in ("coupled", "rejection", "token-rejection")
        for mode in (draft, one)
    ]
    checks.append(check_sampling(shuffled, exact, num_samples, "rejection sampling, shuffled", sampling="rejection"))
    for sampling, thresholds in LOSSY_THRESHOLDS.items():
        for threshold in thresholds:
            options = {"sampling": sampling, "acceptance_threshold": threshold}
            checks.append(check_sampling(draft, exact, num_samples, f"{sampling} {threshold:g}", lossy=True, **options))
    return checks


def check_genai_sampling(toy: Engine) -> list[Check]:
    """openvino-genai's plain sampling, and its sampling with a draft model and with prompt lookup."""
    names = {"genai": "plain sampling", "genai-draft:3": "draft sampling", "genai-ngram:3": "n-gram sampling"}
    exact = _toy_joint(toy)
    return [check_sampling(mode, exact, NUM_SAMPLES, names[mode.name]) for mode in make_modes(list(names), toy)]


@contextmanager
def toy_engine(
    config: Config, formats: tuple[Format, Format] = ("openvino", "openvino"), tokenizer: Path | None = None
) -> Iterator[Engine]:
    """A random main and draft model of 16 tokens, on the devices and with the precision of `config`.

    formats: of main and draft model; "onnx" needs the package onnx. tokenizer: the folder of any tokenizer, for
    runtimes that need one to load a model.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Not every runtime masks logits beyond the vocabulary.
        bundle = save_toy_bundle(
            Path(folder) / "toy", vocab_size=16, draft_noise=0.15, padded=False, tokenizer=tokenizer, formats=formats
        )
        # Without generation options: their token ids belong to the user's bundle.
        options = Config(device=config.device, scheduler=config.scheduler)
        options = options.replace(cache_size=0.01, draft_bundle=None, adapters=None)
        tables = {"properties": formats, "main_properties": formats[:1], "draft_properties": formats[1:]}
        for name, known in tables.items():
            given = getattr(config.device, name)
            options = options.replace(**{name: {k: v for k, v in given.items() if format_of_property(k) in known}})
        yield Engine(bundle, options, tokenizer=ToyTokenizer())
