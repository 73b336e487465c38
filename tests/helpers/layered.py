"""A tiny bundle of several layers, of which some can be left out."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from outrider.bundle import Bundle, DrafterEntry
from outrider_export import export_bundle
from tiny import write_checkpoint, write_gguf

NUM_LAYERS = 5
VOCAB_SIZE = 404


def make_layered(folder: Path, kept: Sequence[int] | None = None, num_layers: int = NUM_LAYERS) -> Bundle:
    """A random model of five layers, or of those `kept`, with a tokenizer."""
    write_checkpoint(folder / "checkpoint", num_layers=num_layers, kept=kept)
    write_gguf(folder / "tiny.gguf", folder / "checkpoint", "Q8_0", "qwen2", {})
    return export_bundle(folder / "tiny.gguf", output=folder / "bundle", weights="int4")


def with_layers(bundle: Bundle, **layers: tuple[int, ...]) -> Bundle:
    """The bundle with drafters of these layers, by name. Nothing is written."""
    main = bundle.manifest.main
    made = tuple(DrafterEntry(name, "self", main, layers=each) for name, each in layers.items())
    return Bundle(bundle.folder, msgspec.structs.replace(bundle.manifest, drafters=made))
