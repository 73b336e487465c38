"""The door of the first load: the models of an engine, compiled in their settings, with what their calls cost.

    loaded, placement = load_models(main, drafts, options, admission.allocate)
    loaded["main"].cost(5)    # seconds of a call of five rows

What is measured at the first load is saved under each model's identity, and read at later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.models.tuning.costs import cost_of
from outrider.models.tuning.loading import Placement, compile_models
from outrider.models.tuning.settled import choice_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.config import DeviceConfig
    from outrider.models.tuning.measure import PassCost
    from outrider.models.tuning.model_spec import ModelSpec
    from outrider.models.tuning.setting import Choice
    from outrider.types import CompiledModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, ready for requests."""

    spec: ModelSpec
    backend: CompiledModel
    cost: PassCost  # seconds of its calls

    @property
    def choice(self) -> Choice:
        """Its setting, and the trials that it was chosen from."""
        return choice_of(self.spec)

    def time_again(self, repeats: int) -> None:
        """Measure and save the cost of its calls. Not while requests run."""
        self.cost.take(cost_of(self.spec, self.backend, repeats))

    @property
    def identity(self) -> dict[str, Any]:
        """All that its keys and values depend on besides what it reads."""
        key = self.spec.identity.compiled(self.backend).key()
        return key | {"cache": self.backend.cache_precision, "bytes": self.backend.bytes_per_token}

    @property
    def setting(self) -> str:
        """Where and how precisely it runs; of a main model, whether drafts cannot change its text."""
        backend, exact, facts = self.backend, "", self.backend.fingerprint
        group_size = facts.get("DYNAMIC_QUANTIZATION_GROUP_SIZE")
        groups = f" in groups of {group_size}" if group_size else ""
        if self.spec.is_main:
            exact = ", bit-exact" if backend.exactness.holds else ", not bit-exact"
        cache = f"cache {backend.cache_precision}"
        threads = facts.get("INFERENCE_NUM_THREADS") if backend.device == "CPU" else None
        threads = f", {threads} thread{'s' * (threads != '1')}" if threads else ""
        columns = f", products of {int(facts['columns']):,} columns" if "columns" in facts else ""
        return f"{backend.device} {backend.precision}{groups}{exact}, {cache}{threads}{columns}, {backend.runtime}"


def load_models(
    main: ModelSpec,
    drafts: Sequence[ModelSpec],
    options: DeviceConfig,
    allocate: Callable[[dict[str, CompiledModel]], None],
    *,
    can_leave_out: bool = False,
) -> tuple[dict[str, LoadedModel], Placement]:
    """Compile an engine's models, have their caches allocated, and time their calls. Returns them by role.

    allocate: is given all of them, which share the memory. can_leave_out: as of `compile_models`. Raises as
    `compile_models` and `allocate`.
    """
    compiled, placement = compile_models(main, drafts, options, can_leave_out=can_leave_out)
    allocate({role: backend for role, (_, backend) in compiled.items()})
    loaded: dict[str, LoadedModel] = {}
    for role in ("main", *(spec.role for spec in drafts if spec.role in compiled)):
        spec, backend = compiled[role]
        # On the main model's processor its speed today is known, too. The first draft packs the weights.
        is_known = role != "main" and loaded["main"].spec.device == spec.device == "CPU"
        scale = loaded["main"].cost.scale if is_known else None
        loaded[role] = LoadedModel(spec, backend, cost_of(spec, backend, scale=scale))
    return loaded, placement
