"""Other runtimes, as modes to compare with. Each is there when it is installed.

::

    genai  genai-ngram:N  genai-draft:N  genai-dynamic:T   openvino-genai on the bundle's own files: plain, prompt
                                                           lookup, a draft model with N tokens a round, or as many as
                                                           its confidence stays above T
    transformers  transformers-draft:N                     Transformers with PyTorch, plain and assisted
    llamacpp  llamacpp-ngram:N                             llama.cpp, plain and with prompt lookup, on a GGUF file
    ortgenai  ortgenai-ngram:N  ortgenai-draft:N           onnxruntime-genai on the bundle's own files, or on folders of
                                                           its own: plain, prompt lookup, a draft model

openvino-genai calculates in what the device chooses, or in what stands behind a slash: genai/f32, genai-draft:3/bf16.
genai/fastest tries all that the device has when it is loaded, and goes on with the quickest.

A peer's module has `load(names, setup)`, which makes the modes of one worker.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.config import LOSSY, GenerationConfig
from outrider.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Collection

    from outrider.bench.modes import ModeName, Setup
    from outrider.config import DeviceConfig


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of mode of another runtime, on models of its own or on the bundle's.

    models: the names that --peer-model must give, with what they hold. format: that of the bundle's models which it
    reads; main, draft: the names by which --peer-model may give others in their place.
    """

    module: str  # in this package
    worker: str  # kinds of one worker share what they load
    package: str  # what is imported
    install: str  # what pip is given
    models: tuple[tuple[str, str], ...] = ()
    format: str = ""
    main: str = ""
    draft: str = ""  # only of a kind that drafts with a model
    most_tokens: int | None = None  # that it drafts in a round
    precisions: bool = False  # whether a mode's name may say what it calculates in

    @property
    def runtime(self) -> str:
        """Its name."""
        return self.package.replace("_", "-")


DRAFT, ORT_MAIN, ORT_DRAFT = "genai-draft", "ortgenai", "ortgenai-draft"  # among the peers' models

PRECISIONS = ("f32", "bf16", "f16")
FASTEST = "fastest"  # of those that the device has

_GENAI = ("openvino_genai", "openvino-genai", (), "openvino")
_TRANSFORMERS = ("transformers", "transformers", "transformers", '"outrider[bench]"')
_CHECKPOINT = ("transformers", "a checkpoint folder or a GGUF file")
_LLAMACPP = ("llama_cpp", "llama-cpp-python", (("llamacpp", "a GGUF file"),))
_ORTGENAI = ("onnxruntime_genai", '"outrider[bench]"', (), "onnx", ORT_MAIN)

PEERS = {
    "genai": Peer("genai", "genai", *_GENAI, precisions=True),
    "genai-ngram": Peer("genai", "genai-ngram", *_GENAI, precisions=True),
    "genai-draft": Peer("genai", "genai-draft", *_GENAI, draft=DRAFT, precisions=True),
    "genai-dynamic": Peer("genai", "genai-draft", *_GENAI, draft=DRAFT, precisions=True),
    "transformers": Peer(*_TRANSFORMERS, (_CHECKPOINT,)),
    "transformers-draft": Peer(*_TRANSFORMERS, (_CHECKPOINT, ("transformers-draft", "the draft model's"))),
    "llamacpp": Peer("llamacpp", "llamacpp", *_LLAMACPP),
    "llamacpp-ngram": Peer("llamacpp", "llamacpp-ngram", *_LLAMACPP),
    "ortgenai": Peer("ortgenai", "ortgenai", *_ORTGENAI),
    "ortgenai-ngram": Peer("ortgenai", "ortgenai", *_ORTGENAI, most_tokens=16),
    "ortgenai-draft": Peer("ortgenai", "ortgenai-draft", *_ORTGENAI, draft=ORT_DRAFT, most_tokens=16),
}

# By format: its name, and the file that a folder given in place of a bundle's model has to hold.
_FORMATS = {"openvino": ("OpenVINO", "openvino_model.xml"), "onnx": ("ONNX", "genai_config.json")}

# What changes the text, or what is known of it; the rest is about drafting.
_TEXT_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "no_repeat_ngram_size",
    "banned_token_ids",
    "min_new_tokens",
    "stop",
    "logprobs",
)

# openvino-genai's. It has no_repeat_ngram_size, which only beam search follows, and logprobs of one token at a place.
GENAI_FOLLOWED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "stop",
)


def check_peer(name: ModeName, setup: Setup) -> None:
    """Make sure, without loading anything, that a peer can be asked for a mode.

    Raises:
        OptionError: when it is not installed, a model is not there or of a format that it does not read, the device
            does not calculate in a precision, or it does not draft that many tokens.
    """
    mode, peer = name.text, PEERS[name.kind]
    if find_spec(peer.package) is None:
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
    """What the devices of a mode say that they calculate in, of `PRECISIONS`.

    A device that is told to calculate in another one takes its default, and does not say so.
    """
    from outrider.backends.devices import find_device

    found = [find_device(device, "openvino") for device in _devices_of(name, setup)]
    return tuple(each for each in PRECISIONS if all(device and each in device.precisions for device in found))


def default_precision(device: DeviceConfig) -> str:
    """What the main device calculates in unless a mode names another one, as `PRECISIONS`; empty: it does not say."""
    import openvino as ov

    given = device.of("main").properties.get("INFERENCE_PRECISION_HINT")
    if given or device.precision != "auto":
        return device.precision if device.precision != "auto" else str(given)
    try:
        return str(ov.Core().get_property(device.main_device, "INFERENCE_PRECISION_HINT").get_type_name())
    except RuntimeError:
        return ""


def _devices_of(name: ModeName, setup: Setup) -> list[str]:
    device = setup.config.device
    drafts = [device.draft_device or device.main_device] if PEERS[name.kind].draft else []
    return list(dict.fromkeys([device.main_device, *drafts]))


def _check_precision(name: ModeName, setup: Setup) -> None:
    has = precisions_of(name, setup)
    if not has or name.precision not in (*has, FASTEST):
        missing = name.precision if has else f"any of {', '.join(PRECISIONS)}"
        instead = f"Choose from {', '.join(has)}" if has else "Leave the precision out"
        raise OptionError(
            f"Mode '{name.text}' cannot be run: {' and '.join(_devices_of(name, setup))} does not say that it "
            f"calculates in {missing}. {instead}."
        )


def _check_format(mode: str, peer: Peer, role: str, key: str, setup: Setup) -> None:
    """Whether a model is one that the peer reads: the bundle's, or what --peer-model gives as `key`."""
    name, file = _FORMATS[peer.format]
    given = setup.peer_models.get(key)
    if given is not None:
        if not (given / file).is_file():
            raise OptionError(f"--peer-model {key}={given} has no {file}. Give a folder that has.")
        return
    model = setup.bundle.manifest.main if role == "main" else setup.drafters[0].model
    if model.format != peer.format:
        instead = f"give a folder with {file} as --peer-model {key}=PATH" if key else "leave the mode out"
        raise OptionError(
            f"{peer.runtime} cannot run mode '{mode}': it reads {name}, and the {role} model is in "
            f"{_FORMATS[model.format][0]}. Export with --format {peer.format}, or {instead}."
        )


def _check_draft(mode: str, peer: Peer, setup: Setup) -> None:
    """Whether the bundle has a draft model that the peer can use, or another was given in its place."""
    if not setup.drafters:
        raise OptionError(f"Mode '{mode}' needs a draft model, and {setup.bundle.folder} has none.")
    drafter = setup.drafters[0]
    if drafter.vocabulary != "same":
        raise OptionError(f"{peer.runtime} cannot run mode '{mode}': the draft model's vocabulary is another.")
    if drafter.num_proposed_tokens and peer.draft not in setup.peer_models:
        raise OptionError(
            f"{peer.runtime} cannot run mode '{mode}': the draft model's output matrix was cut. Give a folder with "
            f"an uncut one as --peer-model {peer.draft}=PATH."
        )


def link(source: str | Path, target: str | Path) -> None:
    """Make `target` the file `source`, without another copy of its bytes where the file system can do that."""
    source = Path(source).resolve()
    for make in (os.link, os.symlink, shutil.copyfile):
        try:
            make(source, target)
        except OSError:  # another disk, a file system without links, a system that forbids them
            if make is shutil.copyfile:
                raise
        else:
            return


def check_vocabulary(path: Path, num_tokens: int, setup: Setup, what: str) -> None:
    """Make sure that a peer's model has the bundle's tokens.

    Raises:
        OptionError: when it has fewer.
    """
    wanted = setup.bundle.manifest.main.vocab_size
    if num_tokens < wanted:
        raise OptionError(
            f"{path} has {num_tokens:,} tokens and the bundle {wanted:,}: the prompts' token ids mean something else "
            f"there. Give {what} of the same model."
        )


def check_options(runtime: str, mode: str, config: GenerationConfig, followed: Collection[str]) -> None:
    """Make sure that a runtime follows the options which change the text.

    Raises:
        OptionError: naming the first that it does not.
    """
    default = GenerationConfig()
    missing = [
        name for name in _TEXT_OPTIONS if name not in followed and getattr(config, name) != getattr(default, name)
    ]
    if config.sampling in LOSSY:
        missing.append(f"sampling='{config.sampling}'")
    if missing:
        raise OptionError(
            f"{runtime} has no {missing[0]} here, so mode '{mode}' cannot be compared with it. "
            "Leave the option or the mode out."
        )
