"""The content of `outrider.json`, and the names of the files that belong to it; see `outrider.bundle`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from outrider.bundle.fields import MOST_LAYERS, MOST_WIDTH, Name, NonNegative, Positive, Width
from outrider.bundle.kinds import COPYING, KINDS, DrafterKind
from outrider.bundle.vision import AnyVisionEntry
from outrider.errors import BundleError
from outrider.system.files import sealed, why, write_whole

MANIFEST_NAME = "outrider.json"
MAP_NAME = "to_main.npy"
PROPOSED_NAME = "proposed.npy"
BYTES_NAME = "token_bytes.msgpack"
CROSS_NAME = "openvino_cross.xml"  # of a decoder: makes the keys and values of its cross-attention
# By format: the file that a backend opens, then its further files.
MODEL_NAMES: dict[Format, tuple[str, ...]] = {
    "openvino": ("openvino_model.xml", "openvino_model.bin"),
    "onnx": ("model.onnx",),
}
ADAPTER_NAMES = ("adapter.xml", "adapter.bin")  # the file that a backend opens, then its further file
# By format: the file of the weights.
WEIGHTS_NAMES: dict[Format, str] = {"openvino": "openvino_model.bin", "onnx": "model.onnx.data"}
SCHEMA_VERSION = 1
VERSION = r"^\d{1,9}(\.\d{1,9})*\Z"

StateKind: TypeAlias = Literal["", "short_convolution", "gated_delta_net", "selective_ssm"]
Format: TypeAlias = Literal["openvino", "onnx"]
TextEncoderKind: TypeAlias = Literal["embedding", "rerank"]
Pooling: TypeAlias = Literal["cls", "mean", "last_token"]
MOST_DRAFTERS = 64  # each is compiled
HeadCount = Annotated[int, msgspec.Meta(ge=0, le=MOST_WIDTH)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's shape, which the runtime needs before it compiles the model."""

    architecture: str  # "llama", "qwen2", … as in config.json's model_type or GGUF's general.architecture
    # With attention or a state; 0 for heads that have none.
    num_layers: Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)]
    num_heads: Width
    num_kv_heads: Width
    head_size: Width
    hidden_size: Width
    context_length: Positive  # tokens the model was trained to attend to
    logits_width: Positive  # of the output matrix: ≥ the vocabulary if padded, < if cut
    # By layer with attention, the tokens that one attends to, itself among them; 0 for all before it. None: not known.
    sliding_windows: tuple[NonNegative, ...] | None = None
    num_experts: NonNegative = 0  # of a layer with a mixture of experts; 0 for dense models
    num_active_experts: NonNegative = 0  # for one token
    # By layer, what it keeps instead of keys and values; "" for attention. (): all layers have attention.
    layer_states: tuple[StateKind, ...] = ()
    # By layer with attention, the heads of its own keys and values, and their size; (0, 0): it reads an earlier
    # layer's. (): all have num_kv_heads of head_size.
    kv_shapes: tuple[tuple[HeadCount, HeadCount], ...] = ()
    value_size: HeadCount = 0  # numbers in a head of values, if not head_size; 0 if so
    long_from: NonNegative = 0  # longer texts are rotated by a second set of frequencies (LongRoPE); 0: there is none

    @property
    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """The heads of keys and values and the size of their keys, of each layer that has such in the cache."""
        alike = ((self.num_kv_heads, self.head_size),) * self.num_attention_layers
        return tuple(shape for shape in self.kv_shapes or alike if all(shape))

    @property
    def numbers_per_token(self) -> int:
        """Numbers that the keys and values of a token have, over all layers."""
        return sum(heads * (size + (self.value_size or size)) for heads, size in self.cache_shapes)

    @property
    def attended_size(self) -> int:
        """Numbers that the heads of a layer's attention give together."""
        return self.num_heads * (self.value_size or self.head_size)

    @property
    def num_cached_layers(self) -> int:
        """Layers that have a cache of their own, of keys and values or of states."""
        return len(self.cache_shapes) + self.num_state_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers that have attention."""
        return self.layer_states.count("") if self.layer_states else self.num_layers

    @property
    def num_state_layers(self) -> int:
        """Layers that keep a state instead."""
        return self.num_layers - self.num_attention_layers


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a model came from and how it was converted."""

    id: str  # hub id, or the name of the folder or file (never a full path)
    kind: str  # "hub", "folder" or "gguf"; "onnx" for a model that was in ONNX already; "peft" for an adapter
    revision: str | None = None  # resolved commit of a hub id
    sha256: Sha256 | None = None  # of a GGUF file, or its parts in order, or an adapter's weights
    recipe: dict[str, str] = {}  # route and the versions of the packages that converted it


class AudioEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an encoder of audio reads (log-mel features, as Whisper's), and the special tokens of its texts."""

    sampling_rate: Positive  # Hz
    num_mel_bins: Positive
    window_length: Positive  # samples of a Fourier transform
    hop_length: Positive  # samples from one to the next
    chunk_seconds: Positive  # of audio that the encoder reads at once
    no_timestamps_token_id: NonNegative
    first_timestamp_token_id: NonNegative  # 0.00 s; each further token is 0.02 s later
    max_initial_timestamp: NonNegative  # how many tokens later the first timestamp may be at most
    languages: dict[str, NonNegative] = {}  # the token of each language; none for a model of one language
    tasks: dict[str, NonNegative] = {}  # the tokens of "transcribe" and "translate"
    no_speech_token_id: NonNegative | None = None  # is likely after the start token where nothing is spoken
    previous_token_id: NonNegative | None = None  # begins the text before this, which is read before the start token


class EncoderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The encoder of an encoder-decoder model, and how the decoder's texts begin.

    A draft model whose encoder is the main model's has the same `folder`.
    """

    folder: Name
    kind: Literal["text", "audio"]
    num_layers: Positive
    hidden_size: Positive
    context_length: Positive  # most positions of a source
    sha256: Sha256  # of its weights as they were in the checkpoint
    begin_token_ids: Annotated[tuple[NonNegative, ...], msgspec.Meta(min_length=1)]  # decoder_start_token_id first
    suppress_token_ids: tuple[NonNegative, ...] = ()  # never generated
    begin_suppress_token_ids: tuple[NonNegative, ...] = ()  # not as an answer's first token
    audio: AudioEntry | None = None  # if `kind` is "audio"


class TextEncoderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model that writes nothing makes of a text: an embedding, or its relevance for a query.

    It is in OpenVINO's format, and its tokenizer in its own folder, as openvino-genai's pipelines need it.
    """

    kind: TextEncoderKind
    pooling: Pooling | None = None  # which hidden states of a text are its embedding
    lowercase: bool = False  # texts are put in lower case before anything else
    prompt: str = ""  # before each text


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of the bundle. Of an encoder-decoder model, `geometry` is the decoder's."""

    folder: Name
    format: Format
    weights: str  # "int8", "int4", "fp16", "fp32", or GGUF's own, such as "Q4_1"
    geometry: Geometry
    vocab_size: Positive  # real tokens; logits at and above this id are masked
    vocab_sha256: Sha256
    source: Source
    encoder: EncoderEntry | None = None  # of an encoder-decoder model
    vision: AnyVisionEntry | None = None  # of a model that reads images
    text_encoder: TextEncoderEntry | None = None  # of an embedding model or a reranker, which no engine runs


class DrafterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named drafter that needs files, or the main model's. Others (n-gram, suffix) are always available."""

    name: Name
    kind: str  # of `outrider.bundle.kinds`; none that copies, as these need no files
    model: ModelEntry
    # "same": the main model's. "intersection": tokens that both have (`outrider.drafters.Intersection`). "text":
    # through the tokens' text (`outrider.drafters.Text`).
    vocabulary: Literal["same", "intersection", "text"] = "same"
    num_shared_tokens: Positive | None = None  # draft tokens that the main model has, too; None: all
    tokenizer: TokenizerEntry | None = None  # if the vocabulary is not "same"
    num_proposed_tokens: Positive | None = None  # draft tokens that its output matrix was cut to; None: all
    features: tuple[str, ...] = ()  # hidden states of the main model that it reads
    num_places: Positive | None = None  # tokens that one call drafts; None: one
    mask_token_id: NonNegative | None = None  # stands for tokens that are to be drafted
    layers: tuple[NonNegative, ...] = ()  # of "self": those of the main model, which `model` is, ascending

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.kind in COPYING:
            raise ValueError(f"there is no kind {self.kind!r} of drafters")

    @property
    def traits(self) -> DrafterKind:
        """What its kind is made of."""
        return KINDS[self.kind]


class TokenizerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer of the main model and of all drafters without their own."""

    folder: Name
    eos_token_ids: tuple[NonNegative, ...]  # every id that ends an answer
    special_token_ids: tuple[NonNegative, ...] = ()
    bos_token_id: NonNegative | None = None
    pad_token_id: NonNegative | None = None
    chat_template: bool = False  # whether the tokenizer has one
    infill: tuple[str, str, str] | None = None  # tokens before a text's beginning, between it and its end, after that


class AdapterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter of the main model, which requests may choose."""

    name: Name
    folder: Name
    rank: Positive  # the largest of its matrices'
    targets: tuple[str, ...]  # the products that it changes, such as "self_attn.q_proj"
    source: Source  # sha256: of its adapter_model.safetensors


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file below the bundle's folder, with forward slashes."""

    path: str
    size: NonNegative
    sha256: Sha256


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `outrider.json`."""

    schema_version: Positive
    minimum_runtime: Annotated[str, msgspec.Meta(pattern=VERSION)]
    created_by: str
    main: ModelEntry
    drafters: Annotated[tuple[DrafterEntry, ...], msgspec.Meta(max_length=MOST_DRAFTERS)]
    tokenizer: TokenizerEntry
    files: tuple[FileEntry, ...]
    adapters: tuple[AdapterEntry, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `outrider.json` into `folder`, which has all files that the manifest lists."""
    (folder / MANIFEST_NAME).write_bytes(_encoded(manifest))


def replace_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it in place of an older one, whole or not at all.

    Raises:
        BundleError: when the folder cannot be written.
    """
    try:
        write_whole(folder / MANIFEST_NAME, _encoded(manifest))
    except OSError as error:
        raise BundleError(f"{folder} cannot be written: {why(error)}. Copy the bundle to another folder.") from error


def _encoded(manifest: Manifest) -> bytes:
    content = sealed(msgspec.json.decode(msgspec.json.encode(manifest)))
    return msgspec.json.format(content, indent=2) + b"\n"


def describe_layers(layers: Sequence[int]) -> str:
    """The ascending numbers of layers as runs, such as "0-13, 18-29"."""
    begins = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(begins, ends, strict=True))
