"""Turn checkpoints into a bundle that outrider runs.

    from outrider_export import export_bundle

    bundle = export_bundle("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", output="my-pair")

A model is a Hugging Face hub id, a local checkpoint folder, or a .gguf file. Main models get int8 weights unless
`weights` says otherwise (int8, int4, fp16, fp32), draft models int4. Llama-like models are converted by
`outrider_export.direct`; others need the packages of `pip install "outrider[export]"`. GGUF files are dequantised for
it.
`format="onnx"` makes models for ONNX Runtime (`pip install "outrider[onnx]"`; int8, int4, fp32).
`draft_format` gives the draft model another format.
With `draft_vocab` the draft model proposes only its most useful tokens; see `outrider_export.diet`. `import_bundle`
takes models that are in ONNX already. `add_drafter` adds a drafter to a bundle, one that reads the main model's hidden
states or a draft model, and `pack` takes one out; see `outrider_export.heads`. `add_adapter` adds a LoRA adapter that
requests may choose, and `adapter=` merges one into the main model. All are modules of `outrider_export.bundles`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider_export.bundles.adapters import add_adapter as add_adapter
    from outrider_export.bundles.drafters import add_drafter as add_drafter
    from outrider_export.bundles.export import export_bundle as export_bundle
    from outrider_export.bundles.take_in import import_bundle as import_bundle
    from outrider_export.heads.packed import pack as pack
    from outrider_export.progress import Progress as Progress
    from outrider_export.progress import Silent as Silent
    from outrider_export.sources.source import default_output as default_output

_MODULE_OF = {
    "Progress": "progress",
    "add_adapter": "bundles.adapters",
    "add_drafter": "bundles.drafters",
    "Silent": "progress",
    "default_output": "sources.source",
    "export_bundle": "bundles.export",
    "import_bundle": "bundles.take_in",
    "pack": "heads.packed",
}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> object:
    # Lazily (PEP 562), because conversions run as modules of this package in processes of their own.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'outrider_export' has no attribute '{name}'")
    return getattr(importlib.import_module(f"outrider_export.{_MODULE_OF[name]}"), name)
