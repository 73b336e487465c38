"""Ways to decode that can be compared: our own, and those of other runtimes on the same prompts.

A mode is written KIND[:N][/PRECISION][@NAME]. Our own, with N draft tokens a round, or as many as the drafter takes by
itself::

    plain   auto   draft:3   ngram:5   suffix:8   shuffled:8   and any drafter that the engine knows

shuffled is for tests of identity: at random every round, one of the drafters or none, and up to N tokens. `auto@NAME`
is our own on another bundle, given as a peer's model. Those of other runtimes are listed in `outrider.bench.peers`, and
so is what of them may name a precision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from outrider.bench.peers import FASTEST, GENAI_FOLLOWED, PEERS, PRECISIONS, check_options, check_peer, precisions_of
from outrider.bundle import draft_models_of, read_bundle
from outrider.config import COPYING
from outrider.errors import OptionError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from outrider.bundle import Bundle, DrafterEntry, ModelEntry
    from outrider.config import Config, GenerationConfig
    from outrider.engine import Engine
    from outrider.types import TextTokenizer


@dataclass(frozen=True, slots=True)
class Run:
    """One request in one mode. Seconds are wall time; total_seconds starts before the prompt is read."""

    token_ids: list[int]
    first_token_seconds: float
    total_seconds: float
    stats: dict[str, Any] = field(default_factory=dict)  # of our own modes

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second after the first token."""
        seconds = self.total_seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / seconds if len(self.token_ids) > 1 and seconds > 0 else 0.0


class Mode(Protocol):
    """One way to decode. description: weights, precision, threads and version, in one line."""

    name: str
    runtime: str
    description: str
    num_parallel: int  # runs that may go on at a time

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        """Decode one prompt."""


@dataclass(frozen=True, slots=True)
class ModeName:
    """A mode's name, taken apart.

    number: draft tokens a round, or genai-dynamic's threshold; None: not given. bundle: the peer's model that is
    another bundle to run on. precision: what a peer is to calculate in; empty: its default.
    """

    text: str
    kind: str
    number: float | None
    bundle: str = ""
    precision: str = ""

    @classmethod
    def parse(cls, text: str) -> ModeName:
        """Take a name apart.

        Raises:
            OptionError: when it is not of the form KIND or KIND:N, with /PRECISION or @NAME behind it or not.
        """
        head, _, bundle = text.partition("@")
        name, _, precision = head.partition("/")
        kind, _, number = name.partition(":")
        form = r"\d*\.?\d+" if kind == "genai-dynamic" else r"\d+"
        empty = ("@" in text) != bool(bundle) or ("/" in head) != bool(precision)
        if not kind or (":" in name and not re.fullmatch(form, number)) or empty:
            raise OptionError(f"There is no mode '{text}': write KIND or KIND:N, such as draft or draft:3.")
        if bundle and kind in PEERS:
            raise OptionError(f"Mode '{text}' cannot be run: only our own modes can have another bundle.")
        if precision and (kind not in PEERS or not PEERS[kind].precisions):
            raise OptionError(
                f"Mode '{text}' cannot be run: only openvino-genai's modes name a precision, as genai/f32. "
                "Ours calculate in what --precision says."
            )
        if precision and precision not in (known := (*PRECISIONS, FASTEST)):
            raise OptionError(f"Mode '{text}' names no precision: write one of {', '.join(known)} behind the slash.")
        return cls(text, kind, float(number) if number else None, bundle, precision)

    @property
    def num_assistant_tokens(self) -> int | None:
        """The number, of modes that count tokens."""
        return None if self.number is None else int(self.number)

    @property
    def worker(self) -> str:
        """Which modes load the same models: ours do, and so do a peer's of one worker."""
        if self.kind in PEERS:
            return PEERS[self.kind].worker + (f"-{self.precision}" if self.precision else "")
        return f"outrider@{self.bundle}" if self.bundle else "outrider"


@dataclass(frozen=True)
class Setup:
    """What the engines of a comparison are made of. `tokenizer` takes the place of the bundle's own in ours.

    trials: for each worker of a mode in the fastest precision, what each precision gave, in tokens per second, where
    that was measured before: it is not measured again.
    """

    bundle: Bundle
    config: Config
    peer_models: Mapping[str, Path] = field(default_factory=dict)  # by peer: a folder or file of its own format
    tokenizer: TextTokenizer | None = None
    trials: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def draft_bundle(self) -> Bundle:
        """Where the draft models are: another bundle, where the configuration names one."""
        folder = self.config.device.draft_bundle
        return self.bundle if folder is None else read_bundle(folder)

    @property
    def drafters(self) -> tuple[DrafterEntry, ...]:
        """The draft models."""
        return draft_models_of(self.draft_bundle, self.bundle)

    @property
    def models(self) -> dict[str, ModelEntry]:
        """All models, "main" and by the drafters' names."""
        return {"main": self.bundle.manifest.main} | {drafter.name: drafter.model for drafter in self.drafters}

    def on(self, name: ModeName) -> Setup:
        """The same with the bundle that a mode runs on.

        Raises:
            OptionError: when it was not given, or has another tokenizer.
            BundleError: when it cannot be read.
        """
        if not name.bundle:
            return self
        folder = self.peer_models.get(name.bundle)
        if folder is None:
            raise OptionError(f"Mode '{name.text}' needs a bundle: give it as --peer-model {name.bundle}=FOLDER.")
        bundle = read_bundle(folder)
        theirs, ours = (
            (one.manifest.main.vocab_size, one.manifest.tokenizer.special_token_ids) for one in (bundle, self.bundle)
        )
        if theirs != ours:
            raise OptionError(f"{folder} has other tokens than {self.bundle.folder}. Leave mode '{name.text}' out.")
        return replace(self, bundle=bundle, config=self.config.replace(draft_bundle=None))


def split_modes(modes: str) -> list[str]:
    """The names in a comma-separated list.

    Raises:
        OptionError: for a name that is not of the form above, or is there twice.
    """
    names = [name.strip() for name in modes.split(",")]
    for name in names:
        ModeName.parse(name)
        if names.count(name) > 1:
            raise OptionError(f"Mode '{name}' is there twice. Leave one out.")
    return names


def make_modes(names: list[str], engine: Engine) -> list[Mode]:
    """The modes of these names in this process, on the engine's bundle, device and precision.

    Raises:
        OptionError: for a name that is not of the form above, names a drafter that the bundle does not have, or a peer
            that is not installed.
    """
    parsed = [ModeName.parse(name) for name in names]
    for name in parsed:
        if name.bundle:
            raise OptionError(f"Mode '{name.text}' has another bundle, which only 'outrider bench' compares with.")
    setup = Setup(engine.bundle, engine.config)
    made: dict[str, Mode] = {}
    for worker in dict.fromkeys(name.worker for name in parsed):
        mine = [name for name in parsed if name.worker == worker]
        modes = _ours(mine, engine) if worker == "outrider" else _peers(mine, setup)
        made |= {mode.name: mode for mode in modes}
    return [made[name] for name in names]


def load_modes(names: list[str], setup: Setup) -> list[Mode]:
    """The modes of one worker, with the engine that they share.

    Raises:
        OptionError: as `make_modes`.
    """
    parsed = [ModeName.parse(name) for name in names]
    return _peers(parsed, setup) if parsed[0].kind in PEERS else our_modes(parsed, setup)[0]


def our_modes(names: list[ModeName], setup: Setup) -> tuple[list[Mode], Engine]:
    """Our own modes of one worker, and the engine that they share."""
    from outrider.engine import Engine

    setup = setup.on(names[0])
    config = setup.config.replace(enable_prefix_caching=False)  # every run reads its whole prompt
    engine = Engine(setup.bundle, config, tokenizer=setup.tokenizer)
    return _ours(names, engine), engine


def default_modes(setup: Setup) -> list[str]:
    """Plain decoding, the engine's own choice, each of its drafters, then openvino-genai's plain decoding."""
    free = setup.config.generation.drafter in (None, *COPYING)  # then draft models are left on disk
    bundled = () if free else setup.drafters
    return ["plain", "auto", *(entry.name for entry in bundled), *COPYING, *default_peers(setup)]


def default_peers(setup: Setup) -> list[str]:
    """openvino-genai in its default precision, and in the fastest where there are several; none where it cannot run."""
    default, fastest = ModeName.parse("genai"), ModeName.parse(f"genai/{FASTEST}")
    try:
        check_options("openvino-genai", default.text, setup.config.generation, GENAI_FOLLOWED)
        check_peer(default, setup)
    except OptionError:
        return []
    return [default.text, fastest.text] if len(precisions_of(fastest, setup)) > 1 else [default.text]


def _ours(names: list[ModeName], engine: Engine) -> list[Mode]:
    from outrider.bench.ours import Ours

    for name in names:
        if name.kind == "draft" and not engine.bundled_drafters:
            raise OptionError(f"Mode '{name.text}' needs a draft model, and {engine.bundle.folder} has none.")
        if name.kind not in ("plain", "auto", "shuffled", *engine.drafters):
            known = ["plain", "auto", "shuffled", *engine.drafters, *PEERS]
            raise OptionError(f"There is no mode '{name.text}': write KIND or KIND:N. {nearest(name.kind, known)}")
    return [Ours(name, engine) for name in names]


def _peers(names: list[ModeName], setup: Setup) -> list[Mode]:
    for name in names:
        check_peer(name, setup)
    module = import_module(f"outrider.bench.peers.{PEERS[names[0].kind].module}")
    modes: list[Mode] = module.load(names, setup)
    return modes
