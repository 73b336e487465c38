"""The settings that a model is tried in on a device, as far as options and processor allow."""

from collections.abc import Iterator

from outrider.models.backends.processor import limit_on, may_divide_by_zero, this_processor, widens_f16
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import GROUP_SIZE, Setting
from outrider.system.core import new_core

_THREADS = "INFERENCE_NUM_THREADS"
_RECURRENT = {"gated_delta_net", "selective_ssm"}  # whose tables have the precision of the calculation


def fewer_threads(spec: ModelSpec) -> list[int]:
    """Numbers of threads to try: the performance cores alone, then halves.

    Threads wait for each other at the end of each operator. In small models, that may take longer than they save.
    """
    own = spec.options
    if not spec.support.tries_settings or own.num_threads or _THREADS in own.properties:
        return []
    cores = this_processor().cores
    count = cores["performance"] if "performance" in cores else cores.get("cores", 0) // 2
    halves = (count >> n for n in range(count.bit_length()))
    return [each for each in halves if each >= 2]


def settings_for(spec: ModelSpec) -> Iterator[Setting]:
    """The settings that the options allow, in the order of preference.

    On other devices than the CPU, compiling may take minutes: there only the device's own choice.
    """
    own = spec.options
    if not spec.support.tries_settings:
        yield Setting(own.precision, own.cache_precision)
        return
    in_f32 = spec.model.encoder is not None  # whose cache has one precision
    known = new_core().get_property(spec.device, "OPTIMIZATION_CAPABILITIES")
    names = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
    if widens_f16(this_processor()):
        del names["f16"]
    precisions = [
        name for name, capability in names.items() if name == "f32" or (capability in known and not limit_on(name))
    ]
    processor, weights = this_processor(), spec.model.weights
    precisions = [name for name in precisions if not may_divide_by_zero(processor, name, weights, own.num_threads)]
    if _RECURRENT & {*spec.model.geometry.layer_states}:
        precisions = ["f32"]  # others round the state at each store, so that drafts would change the text
    if own.precision != "auto" or spec.is_small or not spec.is_main:  # a draft model's bits do not matter
        precisions = ["f32" if own.precision == "auto" else own.precision]
    # Groups of 8-bit weights are whole rows; of 4-bit ones mostly 32 or 64, and wider dynamic groups are slow.
    groups: tuple[int | None, ...] = (128, None) if spec.model.weights == "int8" else (None, 64)
    if GROUP_SIZE in own.properties or spec.is_small or spec.model.weights in ("fp32", "fp16"):
        groups = (None,)
    for precision in precisions:
        for group_size in groups if spec.is_main else groups[:1]:
            cache = "f32" if in_f32 else precision
            yield Setting(precision, cache if own.cache_precision == "auto" else own.cache_precision, group_size)
