"""Which model runs where, and how: whatever is measured of a model, or stored of it, is saved under this."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.system import saved
from outrider.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.types import CompiledModel

T = TypeVar("T")


@dataclass(frozen=True)
class ModelIdentity:
    """The facts that measurements of a model on a device depend on.

        spec.identity.saved("settings", Choice, without=["features"])
        spec.identity.compiled(backend).saved("costs", CallCost)

    A key has all of them. Who leaves one out says why.
    """

    role: str  # "main" or "draft": they make other calls
    files: Mapping[str, str]  # sha256, by path
    geometry: Mapping[str, Any]  # as the manifest describes the model: it decides how the graph is read
    drafter: Mapping[str, Any]  # what a drafter is that is no model of its own, with the files that it shares
    features: Sequence[str]  # hidden states that it gives
    cuts: Sequence[int]  # layers before which its graph is cut
    adapters: Sequence[Any]  # ranks and targets
    device: Mapping[str, str]  # with its driver
    options: Mapping[str, Any]  # that it is compiled with
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    call: Mapping[str, str] = field(default_factory=dict)  # of a compiled model

    def compiled(self, backend: CompiledModel) -> ModelIdentity:
        """The identity of the compiled model."""
        return dataclasses.replace(self, call={**backend.fingerprint, "rows": str(backend.capabilities.rows)})

    def key(self, without: Sequence[str] = ()) -> dict[str, Any]:
        """The facts by name, but those left out."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name not in without}

    def saved(self, folder: str, kind: type[T], without: Sequence[str] = (), **more: Any) -> saved.SavedValue[T]:
        """The value of this kind that is saved in one of the cache's folders. more: facts that it depends on, too."""
        return saved.SavedValue(saved.FOLDER / folder, self.key(without) | more, kind)


def versions_of(*libraries: str) -> dict[str, str]:
    """The versions of Outrider and of these libraries, "openvino" or "onnxruntime", as far as they are installed."""
    versions = {"outrider": __version__}
    if "openvino" in libraries:
        import openvino as ov

        versions["openvino"] = ov.get_version()
    if "onnxruntime" in libraries and find_spec("onnxruntime"):
        import onnxruntime  # several packages contain it, so its metadata cannot be asked

        versions["onnxruntime"] = onnxruntime.__version__
    return versions
