"""Other runtimes, as modes to compare with. Each is there when it is installed.

::

    genai  genai-ngram:N  genai-draft:N  genai-dynamic:T   openvino-genai on the bundle's own files: plain, prompt
                                                           lookup, a draft model with N tokens a round, or as many as
                                                           its confidence stays above T
    transformers  transformers-draft:N                     Transformers with PyTorch, plain and assisted
    llamacpp  llamacpp-ngram:N                             llama.cpp, plain and with prompt lookup, on a GGUF file
    ortgenai                                               onnxruntime-genai on a folder of its own

A peer's module has `load(names, setup)`, which makes the modes of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.config import LOSSY, GenerationConfig
from outrider.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from outrider.bench.modes import Setup


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of mode of another runtime. model: the names that --peer-model must give, with what they hold."""

    module: str  # in this package
    worker: str  # kinds of one worker share what they load
    package: str  # what is imported
    install: str  # what pip is given
    models: tuple[tuple[str, str], ...] = ()
    draft: bool = False  # whether it drafts with the bundle's draft model


_GENAI = ("genai", "openvino_genai", "openvino-genai")
_TRANSFORMERS = ("transformers", "transformers", "transformers", '"outrider[bench]"')
_CHECKPOINT = ("transformers", "a checkpoint folder or a GGUF file")
_LLAMACPP = ("llama_cpp", "llama-cpp-python", (("llamacpp", "a GGUF file"),))

PEERS = {
    "genai": Peer("genai", *_GENAI),
    "genai-ngram": Peer("genai", "genai-ngram", *_GENAI[1:]),
    "genai-draft": Peer("genai", "genai-draft", *_GENAI[1:], draft=True),
    "genai-dynamic": Peer("genai", "genai-draft", *_GENAI[1:], draft=True),
    "transformers": Peer(*_TRANSFORMERS, (_CHECKPOINT,)),
    "transformers-draft": Peer(*_TRANSFORMERS, (_CHECKPOINT, ("transformers-draft", "the draft model's"))),
    "llamacpp": Peer("llamacpp", "llamacpp", *_LLAMACPP),
    "llamacpp-ngram": Peer("llamacpp", "llamacpp-ngram", *_LLAMACPP),
    "ortgenai": Peer(
        "ortgenai",
        "ortgenai",
        "onnxruntime_genai",
        '"outrider[bench]"',
        (("ortgenai", "a folder with genai_config.json"),),
    ),
}

DRAFT = "genai-draft"  # names an openvino-genai draft model of its own among the peers' models

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


def check_peer(mode: str, kind: str, setup: Setup) -> None:
    """Make sure, without loading anything, that a peer can be asked for a mode.

    Raises:
        OptionError: when it is not installed, or a model is not there.
    """
    peer = PEERS[kind]
    if find_spec(peer.package) is None:
        raise OptionError(f"Mode '{mode}' needs a package that is not installed. Run: pip install {peer.install}")
    for name, what in peer.models:
        path = setup.peer_models.get(name)
        if path is None:
            raise OptionError(f"Mode '{mode}' runs on a model of its own: give {what} as --peer-model {name}=PATH.")
        if not path.exists():
            raise OptionError(f"--peer-model {name}={path} is not there. Give {what}.")
    if peer.draft:
        drafters = setup.bundle.manifest.drafters
        if not drafters:
            raise OptionError(f"Mode '{mode}' needs a draft model, and {setup.bundle.folder} has none.")
        if drafters[0].vocabulary != "same":
            raise OptionError(f"openvino-genai cannot run mode '{mode}': the draft model's vocabulary is another.")
        given = setup.peer_models.get(DRAFT)
        if given and not (given / "openvino_model.xml").is_file():
            raise OptionError(f"--peer-model {DRAFT}={given} has no openvino_model.xml. Give a folder that has.")
        if drafters[0].num_proposed_tokens and not given:
            raise OptionError(
                f"openvino-genai cannot run mode '{mode}': the draft model's output matrix was cut. Give a folder with "
                f"an uncut one as --peer-model {DRAFT}=PATH."
            )


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
