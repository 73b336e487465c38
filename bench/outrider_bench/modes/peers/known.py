"""The kinds of modes of other runtimes, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of mode of another runtime, on models of its own or on the bundle's.

    models: names that --peer-model must give, with a description. format: of the bundle's models that it reads. main,
    draft: names by which --peer-model may replace these models.
    """

    module: str  # in this package
    worker: str  # kinds of one worker share their models
    package: str  # to import
    install: str  # for pip
    models: tuple[tuple[str, str], ...] = ()
    format: str = ""
    main: str = ""
    draft: str = ""  # only for a kind with a draft model
    most_tokens: int | None = None  # draft tokens per round
    precisions: bool = False  # whether a mode's name may have a precision
    program: str = ""  # to start, instead of a package to import
    together: bool = False  # whether several requests at a time are compared

    @property
    def runtime(self) -> str:
        """The runtime's name."""
        return self.program or self.package.replace("_", "-")


DRAFT, ORT_MAIN, ORT_DRAFT = "genai-draft", "ortgenai", "ortgenai-draft"  # keys of peers' models
EAGLE3, DFLASH = "genai-eagle3", "genai-dflash"
GENAI_DRAFTS = (DRAFT, EAGLE3, DFLASH)  # workers with a draft model

PRECISIONS = ("f32", "bf16", "f16")
FASTEST = "fastest"  # of the device's precisions

_GENAI = ("openvino_genai", "openvino-genai", (), "openvino")
_WRITTEN = "a folder that bench/scripts/peer_draft.py wrote"
_GGUF = ("llamacpp", "a GGUF file")
_ORTGENAI = ("onnxruntime_genai", '"outrider[bench]"', (), "onnx", ORT_MAIN)

PEERS = {
    "genai": Peer("genai", "genai", *_GENAI, precisions=True, together=True),
    "genai-ngram": Peer("genai", "genai-ngram", *_GENAI, precisions=True, together=True),
    "genai-draft": Peer("genai", "genai-draft", *_GENAI, draft=DRAFT, precisions=True, together=True),
    "genai-dynamic": Peer("genai", "genai-draft", *_GENAI, draft=DRAFT, precisions=True, together=True),
    EAGLE3: Peer("genai", EAGLE3, *_GENAI[:2], ((EAGLE3, _WRITTEN),), _GENAI[3], precisions=True, together=True),
    DFLASH: Peer("genai", DFLASH, *_GENAI[:2], ((DFLASH, _WRITTEN),), _GENAI[3], precisions=True, together=True),
    "llamacpp": Peer("llamacpp", "llamacpp", "", "", (_GGUF,), program="llama-server", together=True),
    "llamacpp-ngram": Peer("llamacpp", "llamacpp-ngram", "", "", (_GGUF,), program="llama-server", together=True),
    "llamacpp-draft": Peer(
        "llamacpp",
        "llamacpp-draft",
        "",
        "",
        (_GGUF, ("llamacpp-draft", "the draft model's GGUF file")),
        program="llama-server",
        together=True,
    ),
    "ortgenai": Peer("ortgenai", "ortgenai", *_ORTGENAI),
    "ortgenai-ngram": Peer("ortgenai", "ortgenai", *_ORTGENAI, most_tokens=16),
    "ortgenai-draft": Peer("ortgenai", "ortgenai-draft", *_ORTGENAI, draft=ORT_DRAFT, most_tokens=16),
}
