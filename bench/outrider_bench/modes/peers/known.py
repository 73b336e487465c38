"""The kinds of modes of other runtimes, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass, replace


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

_WRITTEN = "a folder that bench/scripts/peer_draft.py wrote"
_DRAFT_FILE = ("llamacpp-draft", "the draft model's GGUF file")
_GENAI = Peer("genai", "genai", "openvino_genai", "openvino-genai", format="openvino", precisions=True, together=True)
_WITH_DRAFT = replace(_GENAI, worker=DRAFT, draft=DRAFT)
_GGUF = (("llamacpp", "a GGUF file"),)
_LLAMACPP = Peer("llamacpp", "llamacpp", "", "", _GGUF, program="llama-server", together=True)
_ORTGENAI = Peer("ortgenai", "ortgenai", "onnxruntime_genai", '"outrider[bench]"', format="onnx", main=ORT_MAIN)

PEERS = {
    "genai": _GENAI,
    "genai-ngram": replace(_GENAI, worker="genai-ngram"),
    "genai-draft": _WITH_DRAFT,
    "genai-dynamic": _WITH_DRAFT,
    EAGLE3: replace(_GENAI, worker=EAGLE3, models=((EAGLE3, _WRITTEN),)),
    DFLASH: replace(_GENAI, worker=DFLASH, models=((DFLASH, _WRITTEN),)),
    "llamacpp": _LLAMACPP,
    "llamacpp-ngram": replace(_LLAMACPP, worker="llamacpp-ngram"),
    "llamacpp-draft": replace(_LLAMACPP, worker="llamacpp-draft", models=(*_GGUF, _DRAFT_FILE)),
    "ortgenai": _ORTGENAI,
    "ortgenai-ngram": replace(_ORTGENAI, most_tokens=16),
    "ortgenai-draft": replace(_ORTGENAI, worker=ORT_DRAFT, draft=ORT_DRAFT, most_tokens=16),
}
