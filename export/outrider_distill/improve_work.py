"""The folder `BUNDLE.improve`: what a round has made, the rounds that have ended, and the bundle as it was before each.

begun.json          the round under way
prompts.jsonl       prompts that it trains on, if the user has given some; held-out.jsonl: that it measures
draft               the bundle's own draft model as a checkpoint
data-KEY            the data, for this round and those that follow
drafter-N[.work]    what round N trains, see `outrider_distill.run`; it stays if it is kept; the last head does, too
new, measured       the bundle with it, and the measurements
before-N            the bundle before round N, as long as that is not undone
rounds.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import sha256_of
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.errors import ExportError
from outrider.system.files import reading, write_whole
from outrider_bench.prompts import BenchPrompt
from outrider_bench.prompts import read_prompts as bench_prompts
from outrider_distill.data import bytes_per_token, num_tokens_in
from outrider_distill.draft.from_bundle import draft_model_of, write_checkpoint
from outrider_distill.main_model import read_teacher
from outrider_distill.plan import DistillCandidate, check_heads
from outrider_distill.prediction import DistillTrial, choose
from outrider_distill.prompts import read_prompts
from outrider_distill.run import alone
from outrider_export.target import swap

_LAYERS = (1, 2 / 3, 1 / 2, 1 / 3)  # of the draft model's, that are kept
_EVERY, _MOST = 10, 12  # every tenth prompt of the user's is held out, and so many at most
_OPEN, _NUM_OPEN = ("general", "writing"), 5  # categories of the prompts "open", and how many of each are measured
_MOST_TOKENS, _DISK = 2_000_000, 0.25  # of answers, and the share of the free disk that they may take, prompts aside


@dataclass(frozen=True)
class Begun:
    """A round under way.

    num_tokens: of answers, at most. bundle: sha256 of its manifest. key: of the main model and the prompts held out.
    """

    number: int
    hours: float
    num_tokens: int
    bundle: str
    key: str
    candidates: tuple[DistillCandidate, ...]


@dataclass(frozen=True)
class ImproveRound:
    """A round that has ended. rows: category, tokens per second before and after, and the ratio of whole answers.

    key: see `Begun`. after: sha256 of the bundle's manifest, if it was kept.
    """

    number: int
    kind: str
    kept: bool
    why: str
    rows: list[tuple[str, float, float, float]]
    key: str
    after: str = ""


class ImproveWork:
    """The work folder of the bundle at `path`.

    Raises:
        BundleError: when there is neither.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.folder = self.path.with_name(self.path.name + ".improve")
        self.new, self._begun = self.folder / "new", self.folder / "begun.json"
        self.is_begun = self._begun.exists()
        self.prompts, self.held_out = self.folder / "prompts.jsonl", self.folder / "held-out.jsonl"
        if not self.folder.exists():
            read_bundle(self.path)  # there is one

    @property
    def rounds(self) -> dict[int, ImproveRound]:
        """Those that have ended, by number."""
        found: dict[int, ImproveRound] = self._read(self.folder / "rounds.json", dict[int, ImproveRound]) or {}
        return found

    @property
    def in_place(self) -> ImproveRound | None:
        """The last one that was kept and not undone."""
        kept = [each for each in self.rounds.values() if each.kept and self._before(each.number).exists()]
        return kept[-1] if kept else None

    @property
    def _heads(self) -> list[int]:
        """The rounds that have trained a head."""
        return [number for number, each in self.rounds.items() if each.kind == "eagle3"]

    def drafter(self, number: int) -> Path:
        """What a round trains; `_before`: the bundle before it."""
        return self.folder / f"drafter-{number}"

    def data(self, key: str) -> Path:
        """The training data of the rounds with this key."""
        return self.folder / f"data-{key}"

    def _before(self, number: int) -> Path:
        return self.folder / f"before-{number}"

    @contextlib.contextmanager
    def opened(self) -> Iterator[Bundle]:
        """The bundle, which no other process improves; one is restored that a kill has left between two renames."""
        with alone(self.folder):
            before = sorted(self.folder.glob("before-*"), key=lambda each: int(each.name.split("-")[1]))
            if not self.path.exists() and before:
                before[-1].rename(self.path)
            yield read_bundle(self.path)

    def begun(self, bundle: Bundle, tell: Callable[[str], None]) -> Begun | None:
        """The round under way, if there is one for the bundle as it is."""
        begun: Begun | None = self._read(self._begun, Begun)
        if begun is None or begun.bundle == _identity(bundle):
            return begun
        tell("The bundle has changed since the last run: a new round begins.")
        self._clear(begun.number)
        return None

    def begin(
        self, bundle: Bundle, name: str, hours: float, prompts: Path | None, tell: Callable[[str], None]
    ) -> Begun:
        """Plan a new round. name: the drafter's that earlier rounds have added."""
        main, number = bundle.manifest.main, max(self.rounds, default=0) + 1
        if main.encoder is not None or main.text_encoder is not None:
            raise ExportError(f"{self.path} has no model that only decodes, and drafters are made for such alone.")
        measured = [*bench_prompts(), *(each for each in bench_prompts("open", _NUM_OPEN) if each.category in _OPEN)]
        own = [] if prompts is None else [asdict(each)["content"] for each in read_prompts(prompts)]
        held_out = own[::_EVERY][:_MOST] if len(own) >= _EVERY else []
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in held_out]
        measured += [BenchPrompt(f"yours-{i}", "yours", text) for i, text in enumerate(texts)]
        train = [{"prompt" if isinstance(each, str) else "messages": each} for each in own if each not in held_out]
        held = [{"id": each.id, "category": each.category, "prompt": each.text} for each in measured]
        for path, records in ((self.prompts, train), (self.held_out, held)):
            write_whole(path, "".join(f"{json.dumps(each)}\n" for each in records).encode())
        key = hashlib.sha256(f"{bundle.sha256_of(main.folder)} {held}".encode()).hexdigest()[:16]
        for other in {*self.folder.glob("data-*")} - {self.data(key)}:
            tell("The data of earlier rounds is of another main model, or of other prompts, and is deleted.")
            shutil.rmtree(other, ignore_errors=True)
        room = _DISK * shutil.disk_usage(self.folder).free / bytes_per_token(main.geometry.hidden_size, taps=True)
        most = min(_MOST_TOKENS, num_tokens_in(self.data(key)) + int(room))
        begun = Begun(number, hours, most, _identity(bundle), key, self._candidates(bundle, name, key, tell))
        write_whole(self._begun, msgspec.json.encode(begun))
        return begun

    def end(self, ended: ImproveRound) -> ImproveRound:
        """Keep the new bundle if that is said, and clear up."""
        if ended.kept:
            ended = replace(ended, after=sha256_of(self.new / MANIFEST_NAME))
        write_whole(self.folder / "rounds.json", msgspec.json.encode(self.rounds | {ended.number: ended}))
        if ended.kept:
            swap(self.path, self.new, self._before(ended.number))
        self._clear(ended.number)
        return ended

    def undo(self) -> ImproveRound:
        """Restore what was there before the last round that was kept.

        Raises:
            ExportError: when none was kept, or the bundle has changed since.
        """
        if (last := self.in_place) is None:
            raise ExportError(f"{self.path} has no improvement to undo. See: outrider improve {self.path} --status")
        before, undone = self._before(last.number), self.folder / "undone"
        with self.opened() as bundle:
            if _identity(bundle) != last.after:
                raise ExportError(f"{self.path} has changed since it was improved. What was there is in {before}.")
            swap(self.path, before, undone)
        shutil.rmtree(undone, ignore_errors=True)
        if last.number not in self._heads[-1:]:
            shutil.rmtree(self.drafter(last.number), ignore_errors=True)
        return last

    def status(self) -> list[str]:
        """What is done, what is left, and what is expected, in lines."""
        lines = []
        for each in self.rounds.values():
            state = "kept" if self._before(each.number).exists() else "undone" if each.kept else "not kept"
            lines.append(f"Round {each.number}, {each.kind}: {state}; {each.why}.")
        if (begun := self._read(self._begun, Begun)) is None:
            return [*lines, "No round is under way."]
        work = self.folder / f"drafter-{begun.number}.work"
        spent = sum((self._read(work / "hours.json", dict[str, float]) or {}).values())
        lines.append(f"Round {begun.number} is under way: {spent:.2f} of {begun.hours:g} hours.")
        if self.drafter(begun.number).exists():
            return [*lines, "Trained. Left: measuring, ten minutes at most."]
        num_tokens = num_tokens_in(self.data(begun.key))
        lines.append(f"Data: {num_tokens:,} of {self._read(work / 'num_tokens.json', int) or num_tokens:,} tokens.")
        tried = [self._read(work / f"trial-{each.name}.json", DistillTrial) for each in begun.candidates]
        done = [each for each in tried if each is not None]
        lines.append(f"Trials: {len(done)} of {len(tried)} ({', '.join(each.name for each in begun.candidates)}).")
        if done:
            best = choose(done)
            lines.append(f"Expected so far: {best.prediction.speed_up:.2f} times plain decoding, with {best.kind}.")
        return [*lines, "Left: training and measuring."]

    def _candidates(
        self, bundle: Bundle, name: str, key: str, tell: Callable[[str], None]
    ) -> tuple[DistillCandidate, ...]:
        """What may pay, and can be read from the bundle; says what cannot."""
        found, last, draft = list[DistillCandidate](), self.in_place, self.folder / "draft"
        if last is not None and last.kind == "draft" and any(each.name == name for each in bundle.manifest.drafters):
            found.append(DistillCandidate("further", "draft", str(self.drafter(last.number)), replaces=True))
        try:
            check_heads(str(self.path), bundle.manifest.main.geometry)
            read_teacher(bundle)
            heads = [n for n in self._heads if self.rounds[n].key == key and self.drafter(n).exists()]
            source = str(self.drafter(heads[-1])) if heads else None
            in_place = bool(heads) and self._before(heads[-1]).exists()
            found.append(DistillCandidate("eagle3", "eagle3", source, replaces=in_place))
        except ExportError as error:
            tell(f"No head is trained: {error}")
        if (own := draft_model_of(bundle, name)) is not None:
            try:
                write_checkpoint(bundle, own, draft)
                total = own.model.geometry.num_layers
                for count in dict.fromkeys(max(round(share * total), 1) for share in _LAYERS):
                    layers = count if count < total else None
                    found.append(DistillCandidate(f"draft-{count}", "draft", str(draft), layers, replaces=True))
            except ExportError as error:
                tell(f"The draft model {own.name!r} is not cut: {error}")
        if not found:
            raise ExportError(
                f"Nothing can be trained for {self.path}. Add a draft model of its vocabulary, with the layers "
                "of Llama or Qwen2: outrider add BUNDLE DRAFT"
            )
        return tuple(found)

    def _clear(self, number: int) -> None:
        """Remove what a round has left, but for its data, a drafter that is in place, and the last head."""
        killed = self.folder.glob(".new.partial-*")
        for each in (*map(self.folder.joinpath, ("new", "measured", "draft", f"drafter-{number}.work")), *killed):
            shutil.rmtree(each, ignore_errors=True)
        for made in {number, *self.rounds} - {*self._heads[-1:]}:
            if not self._before(made).exists():
                shutil.rmtree(self.drafter(made), ignore_errors=True)
        self._begun.unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path, kind: Any) -> Any:
        if not path.exists():
            return None
        with reading(str(path), "Delete it.", ExportError):
            return msgspec.json.decode(path.read_bytes(), type=kind)


def _identity(bundle: Bundle) -> str:
    return sha256_of(bundle.folder / MANIFEST_NAME)
