"""Makes modes from their names: in this process, or those of one worker."""

from __future__ import annotations

from importlib import import_module

from outrider.bundle.kinds import COPYING
from outrider.engine.engine import Engine
from outrider.errors import OptionError, nearest
from outrider_bench.modes.mode import Mode
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.ours import Ours
from outrider_bench.modes.peers.check import check_peer, default_precision, follow_options, precisions_of
from outrider_bench.modes.peers.known import PEERS
from outrider_bench.modes.setup import Setup


def make_modes(names: list[str], engine: Engine, *, forgets: bool = False) -> list[Mode]:
    """The modes of these names in this process, on the engine's bundle, device and precision. forgets: see `Ours`.

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
        modes = _ours(mine, engine, forgets=forgets) if worker == "outrider" else _peers(mine, setup)
        made |= {mode.name: mode for mode in modes}
    return [made[name] for name in names]


def load_modes(names: list[str], setup: Setup) -> list[Mode]:
    """The modes of one worker, with the engine that they share.

    Raises:
        OptionError: as `make_modes`.
    """
    parsed = [ModeName.parse(name) for name in names]
    return _peers(parsed, setup) if parsed[0].kind in PEERS else our_modes(parsed, setup)[0]


def our_modes(names: list[ModeName], setup: Setup, *, forgets: bool = True) -> tuple[list[Mode], Engine]:
    """Our own modes of one worker, and the engine that they share. forgets: see `Ours`."""
    from outrider.engine.engine import Engine

    setup = setup.on(names[0])
    config = setup.config.replace(enable_prefix_caching=False)  # every run reads its whole prompt
    engine = Engine(setup.bundle, config, tokenizer=setup.tokenizer)
    return _ours(names, engine, forgets=forgets), engine


def default_modes(setup: Setup, *, together: bool = False) -> list[str]:
    """Plain decoding, the engine's own choice, each of its drafters, and `default_peers`. together: no drafters."""
    if together:
        return ["plain", "auto", *default_peers(setup)]
    free = setup.config.generation.drafter in (None, *COPYING)  # then draft models are not loaded
    bundled = () if free else setup.drafters
    return ["plain", "auto", *(entry.name for entry in bundled), *COPYING, *default_peers(setup)]


def default_peers(setup: Setup) -> list[str]:
    """openvino-genai in its default precision, and in each other one of the device; none if it cannot run."""
    genai = ModeName.parse("genai")
    try:
        follow_options("genai", "openvino-genai", genai.text, setup.config.generation)
        check_peer(genai, setup)
    except OptionError:
        return []
    default = default_precision(setup.config.device)
    return [genai.text, *(f"{genai.text}/{each}" for each in precisions_of(genai, setup) if each != default)]


def _ours(names: list[ModeName], engine: Engine, *, forgets: bool) -> list[Mode]:
    for name in names:
        if name.kind == "draft" and not engine.bundled_drafters:
            raise OptionError(f"Mode '{name.text}' needs a draft model, and {engine.bundle.folder} has none.")
        if name.kind not in ("plain", "auto", "shuffled", *engine.drafters):
            known = ["plain", "auto", "shuffled", *engine.drafters, *PEERS]
            raise OptionError(f"There is no mode '{name.text}': write KIND or KIND:N. {nearest(name.kind, known)}")
    return [Ours(name, engine, forgets=forgets) for name in names]


def _peers(names: list[ModeName], setup: Setup) -> list[Mode]:
    for name in names:
        check_peer(name, setup)
    module = import_module(f"outrider_bench.modes.peers.{PEERS[names[0].kind].module}")
    modes: list[Mode] = module.load(names, setup)
    return modes
