"""Checks before another runtime is loaded: that it is installed and supports the mode."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.config import LOSSY, DeviceConfig, GenerationConfig
from outrider.config.option import options_of
from outrider.errors import OptionError
from outrider.system.core import new_core
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers.known import GENAI_DRAFTS, PEERS, PRECISIONS, Peer
from outrider_bench.modes.setup import Setup

# By format: its name, and a file that a folder with such a model must have.
_FORMATS = {"openvino": ("OpenVINO", "openvino_model.xml"), "onnx": ("ONNX", "genai_config.json")}


def check_peer(name: ModeName, setup: Setup) -> None:
    """Check, without loading anything, that a peer supports a mode.

    Raises:
        OptionError: when it is not installed, a model is missing or of another format, the device lacks the precision,
        or
            the peer does not draft that many tokens.
    """
    mode, peer = name.text, PEERS[name.kind]
    if peer.program and shutil.which(peer.program) is None:
        raise OptionError(f"Mode '{mode}' needs the program {peer.program} on the PATH, and there is none. Install it.")
    if peer.package and find_spec(peer.package) is None:
        raise OptionError(f"Mode '{mode}' needs a package that is not installed. Run: pip install {peer.install}")
    number = name.num_assistant_tokens
    if peer.most_tokens and number is not None and not 1 <= number <= peer.most_tokens:
        raise OptionError(f"{peer.runtime} drafts 1 to {peer.most_tokens} tokens a round, so '{mode}' cannot be run.")
    for key, what in peer.models:
        path = setup.peer_models.get(key)
        if path is None:
            raise OptionError(f"Mode '{mode}' runs on a model of its own: give {what} as --peer-model {key}=PATH.")
        if not path.exists():
            raise OptionError(f"--peer-model {key}={path} is not there. Give {what}.")
    if peer.format:
        _check_format(mode, peer, "main", peer.main, setup)
    if peer.draft:
        _check_draft(mode, peer, setup)
        _check_format(mode, peer, "draft", peer.draft, setup)
    if name.precision:
        _check_precision(name, setup)


def precisions_of(name: ModeName, setup: Setup) -> tuple[str, ...]:
    """Those of `PRECISIONS` that all devices of a mode support.

    A device silently replaces an unsupported precision by its default.
    """
    from outrider.models.backends.devices import find_device

    found = [find_device(device, "openvino") for device in _devices_of(name, setup)]
    return tuple(each for each in PRECISIONS if all(device and each in device.precisions for device in found))


def default_precision(device: DeviceConfig) -> str:
    """The main device's default precision, as in `PRECISIONS`; empty: unknown."""
    from outrider.models.backends.processor import precision_of_device

    given = device.of("main").properties.get("INFERENCE_PRECISION_HINT")
    if given or device.precision != "auto":
        return device.precision if device.precision != "auto" else str(given)
    return precision_of_device(new_core(), device.main_device)


def _devices_of(name: ModeName, setup: Setup) -> list[str]:
    device = setup.config.device
    drafts = [device.draft_device or device.main_device] if PEERS[name.kind].worker in GENAI_DRAFTS else []
    return list(dict.fromkeys([device.main_device, *drafts]))


def _check_precision(name: ModeName, setup: Setup) -> None:
    has = precisions_of(name, setup)
    if name.precision not in has:
        missing = name.precision if has else f"any of {', '.join(PRECISIONS)}"
        instead = f"Choose from {', '.join(has)}" if has else "Leave the precision out"
        raise OptionError(
            f"Mode '{name.text}' cannot be run: there is no support for {missing} on "
            f"{' and '.join(_devices_of(name, setup))}. {instead}."
        )


def _check_format(mode: str, peer: Peer, role: str, key: str, setup: Setup) -> None:
    """Check that the peer reads a model's format: the bundle's, or the one that --peer-model gives as `key`."""
    name, file = _FORMATS[peer.format]
    given = setup.peer_models.get(key)
    if given is not None:
        if not (given / file).is_file():
            raise OptionError(f"--peer-model {key}={given} has no {file}. Give a folder that has.")
        return
    model = setup.bundle.manifest.main if role == "main" else setup.draft_models[0].model
    if model.format != peer.format:
        instead = f"give a folder with {file} as --peer-model {key}=PATH" if key else "leave the mode out"
        raise OptionError(
            f"{peer.runtime} cannot run mode '{mode}': it reads {name}, and the {role} model is in "
            f"{_FORMATS[model.format][0]}. Export with --format {peer.format}, or {instead}."
        )


def _check_draft(mode: str, peer: Peer, setup: Setup) -> None:
    """Check that the bundle has a draft model that the peer can use, or that another one was given."""
    if not setup.draft_models:
        raise OptionError(f"Mode '{mode}' needs a draft model, and {setup.bundle.folder} has none.")
    drafter = setup.draft_models[0]
    if drafter.vocabulary != "same":
        raise OptionError(f"{peer.runtime} cannot run mode '{mode}': the draft model's vocabulary is another.")
    if drafter.num_proposed_tokens and peer.draft not in setup.peer_models:
        raise OptionError(
            f"{peer.runtime} cannot run mode '{mode}': the draft model's output matrix was cut. Give a folder with "
            f"an uncut one as --peer-model {peer.draft}=PATH."
        )


def check_vocabulary(path: Path, num_tokens: int, setup: Setup, what: str) -> None:
    """Check that a peer's model has the bundle's tokens.

    Raises:
        OptionError: when it has fewer.
    """
    wanted = setup.bundle.manifest.main.vocab_size
    if num_tokens < wanted:
        raise OptionError(
            f"{path} has {num_tokens:,} tokens and the bundle {wanted:,}: the prompts' token ids mean something else "
            f"there. Give {what} of the same model."
        )


def follow_options(peer: str, runtime: str, mode: str, config: GenerationConfig, *, but: str = "") -> dict[str, Any]:
    """The values of the options that a runtime follows. peer: as in `Option.peers`. but: an option that the mode lacks.

    Raises:
        OptionError: with the first option that is set, changes the text, and is not followed.
    """
    values: dict[str, Any] = {}
    missing = [f"sampling='{config.sampling}'"] if config.sampling in LOSSY else []
    for name, described in options_of(GenerationConfig).items():
        value = getattr(config, name)
        if described.peers is not None and peer in described.peers and name != but:
            values[name] = value
        elif described.peers is not None and value != described.default:
            missing.append(name)
    if missing:
        raise OptionError(
            f"{runtime} has no {missing[0]} here, so mode '{mode}' cannot be compared with it. "
            "Leave the option or the mode out."
        )
    return values
