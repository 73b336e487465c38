"""What a distillation will do, with what it takes, before it begins; and that it goes on with the same options.

    plan = make_the_plan(options)
    plan = freeze(plan, work / "plan.json")

A plan is frozen in the work folder. Going on with other options is refused: half of the work would be of another kind.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from outrider.bundle.folder import read_bundle
from outrider.bundle.hashes import sha256_of
from outrider.bundle.manifest import MANIFEST_NAME, Geometry
from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError, nearest
from outrider.system.files import reading, usable, write_whole
from outrider.system.memory import system_memory
from outrider_distill.data import USUAL_ANSWER, USUAL_PROMPT, bytes_per_token, tap_names
from outrider_distill.train.files import load
from outrider_export.bundles.drafters import check_name
from outrider_export.describe.architectures import ARCHITECTURES
from outrider_export.describe.plan import DEFAULT_WEIGHTS, make_plan
from outrider_export.heads.formats import read_head
from outrider_export.progress import Progress, Silent
from outrider_export.sources.source import fetch, locate

KINDS = ("eagle3", "draft")
_ADAM = 16  # bytes a weight in training: itself, its gradient and two moments
_CHECKPOINT = 16  # the same in a checkpoint: weights, moments, and the best weights so far
_TRIAL_BYTES = 2_000_000_000  # bytes: activations, and what Python and torch take
_HEAD_TOKENS = 8192  # rows of a head's output matrix


@dataclass(frozen=True)
class DistillCandidate:
    """A drafter to train.

    source: what layers are taken out of, or is trained further. replaces: whether a drafter of the bundle gives way.
    """

    name: str
    kind: str
    source: str | None = None
    num_layers: int | None = None  # of the draft model, to keep
    replaces: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether it begins with weights that were trained as a drafter's."""
        return self.source is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of that stays."""
        return self.is_trained and self.num_layers is None


@dataclass(frozen=True)
class Options:
    """What the user has asked for. num_tokens: of answers. hours: of data and training together, at most."""

    main: str
    output: Path
    kind: str = "auto"
    source: str | None = None  # the draft model that layers are taken out of, or the head that is trained further
    num_layers: int | None = None
    prompts: Path | None = None
    excluded: Path | None = None
    num_tokens: int = 2_000_000
    hours: float = 8.0
    into: Path | None = None
    seed: int = 0
    keep_work: bool = False
    tried: tuple[DistillCandidate, ...] = ()  # in place of kind, source and num_layers
    shared_data: Path | None = None  # a folder with data that others have begun, or will go on with

    @property
    def work(self) -> Path:
        """The folder beside the output that has everything until it is done."""
        return self.output.with_name(self.output.name + ".work")

    @property
    def data(self) -> Path:
        """The folder of the training data."""
        return self.shared_data or self.work / "data"

    @property
    def candidates(self) -> tuple[DistillCandidate, ...]:
        """What is compared, and the best of it trained."""
        if self.tried:
            return self.tried
        draft = DistillCandidate("draft", "draft", self.source, self.num_layers)
        if self.kind == "auto":
            return (DistillCandidate("eagle3", "eagle3"), *([draft] if self.source is not None else []))
        return (draft if self.kind == "draft" else DistillCandidate(self.kind, self.kind, self.source),)

    @property
    def taps(self) -> bool:
        """Whether one of them reads hidden states."""
        return any(each.kind != "draft" for each in self.candidates)


@dataclass(frozen=True)
class DistillPlan:
    """What must not change until the work is done (the first part), and what it takes.

    bytes_of_data, bytes_on_disk: the latter with checkpoints and the bundle. bytes_of_memory: at most at any time.
    """

    main: str
    main_sha256: str | None  # of a bundle's files
    kind: str
    source: str | None
    num_layers: int | None
    prompts: str | None  # sha256
    excluded: str | None
    num_tokens: int
    hours: float
    seed: int
    bytes_of_data: int
    bytes_on_disk: int
    bytes_of_memory: int

    def lines(self) -> list[str]:
        """The plan for the user."""
        prompts = "general prompts and the model's own" if self.prompts is None else "your prompts and the model's own"
        several = self.kind == "auto" or "," in self.kind
        kind = "the drafter that gains most per hour" if several else f"a drafter of kind {self.kind}"
        total = system_memory()[0]
        has = "" if total is None else f" of {total / 1e9:.0f} GB"
        return [
            f"{kind[0].upper()}{kind[1:]} for {Path(self.main).name}, from {self.num_tokens:,} tokens of its answers "
            f"to {prompts}.",
            f"Disk: up to {self.bytes_on_disk / 1e9:.1f} GB during the work, {self.bytes_of_data / 1e9:.1f} GB of "
            f"them data. Memory: up to {self.bytes_of_memory / 1e9:.1f} GB{has}. Time: up to {self.hours:g} hours.",
        ]


def check_options(options: Options) -> None:
    """Check what can be checked before anything is read.

    Raises:
        OptionError: for a wrong value, or options that do not go together.
        ExportError: when there is something at the output.
    """
    if options.kind not in (*KINDS, "auto"):
        raise OptionError(f"kind={options.kind!r} is not a kind of drafter. {nearest(options.kind, (*KINDS, 'auto'))}")
    if options.num_tokens < 1000:
        raise OptionError(f"tokens={options.num_tokens} is too few to train on: give at least 1000, such as 2M.")
    if not 0 < options.hours <= 10_000:
        raise OptionError(f"hours={options.hours:g} is not above 0 and at most 10,000. Give a number in this range.")
    if options.kind == "draft" and options.source is None:
        raise OptionError(
            "kind='draft' takes layers out of a draft model. Name one of the same vocabulary with --from."
        )
    if options.kind not in ("draft", "auto") and options.num_layers is not None:
        raise OptionError(f"--layers is for draft models, and kind={options.kind!r} is a head. Leave it out.")
    if options.kind in ("draft", "auto") and (options.source is None) != (options.num_layers is None):
        raise OptionError("--from and --layers go together: the draft model, and how many of its layers to keep.")
    if options.num_layers is not None and options.num_layers < 1:
        raise OptionError(f"layers={options.num_layers} leaves no layer. Give at least 1.")
    if options.into is not None:
        check_name(options.output.name, read_bundle(options.into))
    if usable(options.output).exists():
        raise ExportError(f"{options.output} exists. Choose another name with -o.")


def make_the_plan(options: Options, progress: Progress | None = None) -> DistillPlan:
    """The plan for these options, which were checked.

    Raises:
        ExportError: when the main model or a file of prompts cannot be read, does not fit, or the disk lacks room.
    """
    geometry, size, content = _look_at(options.main, progress or Silent())
    if options.taps:
        check_heads(options.main, geometry)
    for each in options.candidates:
        if each.kind != "draft" and each.source is not None:
            _check_head(each.kind, head_folder(each.source, progress or Silent()), geometry)
    per_token = bytes_per_token(geometry.hidden_size, taps=options.taps)
    data = int(options.num_tokens * (1 + USUAL_PROMPT / USUAL_ANSWER) * per_token)
    weights = max(_num_weights(each.kind, geometry) for each in options.candidates)
    disk = data + weights * (_CHECKPOINT + 2) + (0 if content else 4 * size)
    matrices = 2 * 4 * geometry.logits_width * geometry.hidden_size
    memory = _TRIAL_BYTES + max(2 * size, matrices + weights * _ADAM)
    plan = DistillPlan(
        main=str(_resolved(options.main)),
        main_sha256=content,
        kind=",".join(each.name for each in options.tried) or options.kind,
        source=None if options.source is None else str(_resolved(options.source)),
        num_layers=options.num_layers,
        prompts=_sha256(options.prompts),
        excluded=_sha256(options.excluded),
        num_tokens=options.num_tokens,
        hours=options.hours,
        seed=options.seed,
        bytes_of_data=data,
        bytes_on_disk=disk,
        bytes_of_memory=memory,
    )
    _check_disk(options, plan)
    return plan


def check_heads(main: str, geometry: Geometry) -> None:
    """Raise ExportError if a main model of this shape gives no hidden states for heads."""
    known = ARCHITECTURES.get(geometry.architecture)
    if known is not None and not known.features:
        raise ExportError(
            f"{main} has the architecture '{geometry.architecture}', whose hidden states are not found in its graph, "
            "and heads read them. Train a draft model: --kind draft --from DRAFT."
        )
    tap_names(geometry.num_layers)


def head_folder(name: str, progress: Progress) -> Path:
    """The folder of the head that is trained further, which is fetched if it is a hub id."""
    return fetch(locate(name), False, progress).fetched


def freeze(plan: DistillPlan, path: Path) -> DistillPlan:
    """The plan in the file `path`, which is written if it is not there.

    Raises:
        OptionError: when the file has other options.
        ExportError: when it cannot be read or written.
    """
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.format(msgspec.json.encode(plan)))
        except OSError as error:
            raise ExportError(f"{path} cannot be written: {error.strerror}. Choose another folder with -o.") from error
        return plan
    with reading(str(path), "Delete the work folder to begin again.", ExportError):
        found = msgspec.json.decode(path.read_bytes(), type=DistillPlan)
    for name, asked in asdict(plan).items():
        before = getattr(found, name)
        if before != asked and not name.startswith("bytes"):
            option = {"source": "from", "num_layers": "layers", "num_tokens": "tokens"}.get(name, name)
            raise OptionError(
                f"{path.parent} was begun with {option}={before}, and this is {asked}. Use the same options, or "
                "delete the folder to begin again."
            )
    return found


def parse_count(text: str) -> int:
    """A number of tokens such as 500000, 500k or 2M.

    Raises:
        OptionError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.replace(",", "").replace("_", "").strip())
    if found is None:
        raise OptionError(f"tokens={text!r} is not a number of tokens. Give one such as 500k or 2M.")
    return int(float(found[1]) * {"": 1, "k": 1000, "m": 1_000_000}[found[2].lower()])


def _look_at(main: str, progress: Progress) -> tuple[Geometry, int, str | None]:
    """A main model's shape, bytes of its files in a bundle, and their hash; None if it is none."""
    if (usable(user_path(main)) / MANIFEST_NAME).is_file():
        bundle = read_bundle(user_path(main))
        entry = bundle.manifest.main
        if entry.encoder is not None:
            raise ExportError(f"{main} has an encoder-decoder model, and drafters are made for decoders only.")
        return entry.geometry, bundle.size_of(entry.folder), bundle.sha256_of(entry.folder)
    source = fetch(locate(main), False, progress)
    plan = make_plan("main", source, "openvino", DEFAULT_WEIGHTS["main"])
    if plan.encoder is not None:
        raise ExportError(f"{main} is an encoder-decoder model, and drafters are made for decoders only.")
    return plan.geometry, plan.num_weights, None


def _check_head(kind: str, folder: Path, geometry: Geometry) -> None:
    """Raise unless the head is of the kind, fits the main model, and can be read: before data is written for it."""
    head = read_head(folder, geometry)
    if head.kind != kind:
        raise OptionError(f"--from {folder} is a head of kind {head.kind}, not {kind}. Use --kind {head.kind}.")
    if head.features != (wanted := tap_names(geometry.num_layers)):
        raise ExportError(
            f"{folder} reads the hidden states {', '.join(head.features)}, and distill writes {', '.join(wanted)}. "
            "Train a new head: leave out --from."
        )
    load(folder, torch.zeros(geometry.logits_width, geometry.hidden_size))


def _num_weights(kind: str, geometry: Geometry) -> int:
    """About how many weights of a drafter are trained."""
    hidden = geometry.hidden_size
    matrix = min(_HEAD_TOKENS, geometry.logits_width) * hidden
    layer = 16 * hidden * hidden  # attention, and a gated MLP
    return {
        "eagle3": layer + 7 * hidden * hidden + matrix,
        "draft": geometry.num_layers * layer // 2,
    }[kind]


def _check_disk(options: Options, plan: DistillPlan) -> None:
    """Raise if the disk has no room for what is not there yet."""
    folder = next(each for each in options.work.absolute().parents if each.exists())
    files = {*options.work.rglob("*"), *options.data.rglob("*")}
    there = sum(path.stat().st_size for path in files if path.is_file())
    free = shutil.disk_usage(folder).free + there
    if plan.bytes_on_disk <= free:
        return
    per_token = plan.bytes_of_data / plan.num_tokens
    possible = int((free - plan.bytes_on_disk + plan.bytes_of_data) / per_token) // 1000
    fewer = f"--tokens {possible}k" if possible > 0 else "another disk with -o"
    raise ExportError(
        f"{plan.num_tokens:,} tokens of data, checkpoints and models need {plan.bytes_on_disk / 1e9:.1f} GB, and "
        f"{folder} has {free / 1e9:.1f} GB free. Use {fewer}."
    )


def _resolved(name: str) -> str | Path:
    """A path that exists, so that it is the same from other folders; a hub id as it is."""
    path = usable(user_path(name))
    return path.resolve() if path.exists() else name


def _sha256(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return sha256_of(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}. Name a file of prompts.") from error
