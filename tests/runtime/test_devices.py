"""Devices: how they are found, what happens when one fails, and which options they get.

Test machines have only a CPU. Here, "GPU" is ONNX Runtime's CPU provider under another name, in this process and in the
child processes that try it. OpenVINO's GPU is a fake.
"""

import contextlib
import gc
import os
import platform
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

import outrider
from outrider.bundle import Bundle, Format
from outrider.errors import DeviceError
from outrider.models.backends import devices, onnx_providers, processor
from outrider.models.backends.devices import Device, compile_error
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.tuning import loading, model_spec, placement, probe
from outrider.models.tuning.model_spec import ModelSpec
from outrider.system import saved
from outrider.system.memory import system_memory
from outrider.testing import ToyTokenizer, save_toy_bundle

SMALL = outrider.Config().replace(cache_size=0.01)

# The child of a machine whose GPU is the CPU; what comes before `probe.main()` is what its driver does.
CHILD = """
import os, sys
from outrider.models.backends import onnx_providers
from outrider.models.tuning import probe
onnx_providers._PROVIDERS["GPU"] = onnx_providers._PROVIDERS["CPU"]
open({log!r}, "a").write("tried\\n")
{driver}
probe.main()
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle", formats=("onnx", "onnx"))


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A GPU. Returns a function that sets the program that its driver runs; at first an empty one."""
    monkeypatch.setattr(saved, "FOLDER", tmp_path / "saved")
    monkeypatch.setitem(onnx_providers._PROVIDERS, "GPU", onnx_providers._PROVIDERS["CPU"])

    def drive(driver: str) -> None:
        program = CHILD.format(log=str(tmp_path / "log"), driver=driver)
        monkeypatch.setattr(probe, "child_command", lambda: [sys.executable, "-c", program])

    drive("")
    return drive


def num_tried(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return log.read_text().count("tried") if log.exists() else 0


def load(bundle: Bundle, **options: Any) -> outrider.Engine:
    return outrider.Engine(bundle, SMALL.replace(**options), tokenizer=ToyTokenizer())


def answers_as_it_should(engine: outrider.Engine) -> bool:
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    drafted = engine.generate("hello", drafter="draft", num_assistant_tokens=3, **options)
    plain = engine.generate("hello", drafter=None, **options)
    return drafted.stats.num_draft_tokens > 0 and drafted.token_ids == plain.token_ids


ABORT = "probe.ModelSpec.compile = lambda *_, **__: os.abort()"
SEGFAULT = "import ctypes; probe.ModelSpec.compile = lambda *_, **__: ctypes.string_at(0)"
EXIT = "probe.ModelSpec.compile = lambda *_, **__: os._exit(3)"
NOISY_EXIT = "print('driver: cannot go on'); " + EXIT
ILLEGIBLE_EXIT = r"""os.write(1, b'{"works": true, "reason": "\xff"}\n'); """ + EXIT
REFUSE = "def no(*_, **__): raise RuntimeError('no kernels for this')\nprobe.ModelSpec.compile = no"


class TestADriverThatCrashes:
    """It crashes the child process that tries the device, and nothing else."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("driver", "said"), [
        (ABORT, "was ended by SIGABRT" if os.name != "nt" else "ended with code"),
        (SEGFAULT, "was ended by SIGSEGV" if os.name != "nt" else "ended with code"),
        (NOISY_EXIT, "ended with code 3"),
        (ILLEGIBLE_EXIT, "ended with code 3"),
        (REFUSE, "RuntimeError: no kernels for this"),
    ], ids=["abort", "segfault", "exit", "illegible exit", "refusal"])  # fmt: skip
    def test_the_draft_model_goes_elsewhere(
        self, bundle: Bundle, gpu: Callable[[str], None], driver: str, said: str
    ) -> None:
        gpu(driver)
        with pytest.warns(outrider.DeviceWarning, match=f"'draft' does not run on GPU: .*{said}.* CPU is used instead"):
            engine = load(bundle, draft_device="GPU")
        assert answers_as_it_should(engine)
        assert engine.setting["draft_device"].startswith("CPU")
        assert (engine.placement.main, engine.placement.draft) == ("CPU", "CPU")
        assert engine.placement.why == "CPU and GPU cannot be used, as warned"

    def test_a_main_device_that_was_named_is_an_error(self, bundle: Bundle, gpu: Callable[[str], None]) -> None:
        gpu(ABORT)
        with pytest.raises(
            outrider.DeviceError,
            match="The main model does not run on GPU: .* test it again with 'outrider devices --again",
        ):
            load(bundle, main_device="GPU")

    @pytest.mark.slow
    def test_auto_does_without_it(self, bundle: Bundle, gpu: Callable[[str], None]) -> None:
        gpu(ABORT)
        with pytest.warns(outrider.DeviceWarning, match="does not run on GPU: .* It is not chosen"):
            engine = load(bundle, main_device="auto")
        assert answers_as_it_should(engine)
        assert engine.placement.main == engine.placement.draft == engine.config.device.main_device == "CPU"
        gpu("")  # the driver is repaired
        probe.forget()
        assert load(bundle, main_device="auto").placement.main == "GPU"

    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("error", [outrider.OptionError, outrider.BundleError])
    def test_auto_does_without_what_is_not_for_these_models(
        self, bundle: Bundle, gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
    ) -> None:
        gpu("")

        compile_it = ModelSpec.compile

        def picky(spec: ModelSpec, *args: Any) -> Any:
            if spec.device == "GPU":
                raise error("It has other needs.")
            return compile_it(spec, *args)

        monkeypatch.setattr(ModelSpec, "compile", picky)
        with pytest.warns(
            outrider.DeviceWarning, match=r"main model does not run on GPU: It has other needs\. CPU is used instead"
        ):
            engine = load(bundle, main_device="auto")
        assert (engine.placement.main, engine.placement.draft) == ("CPU", "CPU")
        with pytest.raises(error, match="other needs"):
            load(bundle, draft_device="GPU")

    @pytest.mark.slow
    @pytest.mark.needs("POSIX")
    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
    def test_one_that_was_ended_from_outside_is_not_blamed(
        self, bundle: Bundle, gpu: Callable[[str], None], name: str
    ) -> None:
        gpu(f"import signal; probe.ModelSpec.compile = lambda *_, **__: os.kill(os.getpid(), signal.{name})")
        part = ModelSpec("main", bundle, bundle.manifest.main)
        verdict = probe.verdict_of(part.on("GPU", SMALL.device))
        assert verdict.works is None
        assert verdict.reason == f"the process that tested it was ended by {name}"
        gpu("")
        assert probe.verdict_of(part.on("GPU", SMALL.device)).works  # tried again

    @pytest.mark.slow
    def test_one_that_hangs_ends_by_itself(self, bundle: Bundle, gpu: Callable[[str], None]) -> None:
        """Its parent process may have been killed."""
        gpu("import time; probe.PATIENCE = 0.3; probe.ModelSpec.compile = lambda *_, **__: time.sleep(600)")
        part = ModelSpec("main", bundle, bundle.manifest.main)
        assert "ended with code 1" in probe.verdict_of(part.on("GPU", SMALL.device)).reason

    @pytest.mark.slow
    def test_one_that_hangs_is_given_up(
        self, bundle: Bundle, gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu("import time; probe.ModelSpec.compile = lambda *_, **__: time.sleep(600)")
        monkeypatch.setattr(probe, "PATIENCE", 4.0)
        with pytest.warns(outrider.DeviceWarning, match="it was not ready after 4 seconds"):
            assert answers_as_it_should(load(bundle, draft_device="GPU"))

    @pytest.mark.slow
    def test_what_crashes_after_it_has_worked_has_worked(self, bundle: Bundle, gpu: Callable[[str], None]) -> None:
        gpu("import atexit; atexit.register(os.abort)")
        assert load(bundle, draft_device="GPU").setting["draft_device"].startswith("GPU")


class TestVerdicts:
    """A device is tried once, and again after a change."""

    @pytest.mark.slow
    def test_a_device_that_works_is_used_and_not_tried_again(
        self, bundle: Bundle, gpu: Callable[[str], None], tmp_path: Path
    ) -> None:
        for _ in range(2):
            engine = load(bundle, main_device="GPU")
            assert answers_as_it_should(engine)
            assert all(where.startswith("GPU f32") for where in engine.setting.values())
            assert num_tried(tmp_path) == 2  # a child for each model

    @pytest.mark.slow
    def test_it_is_tried_again_when_something_has_changed(
        self, bundle: Bundle, gpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = ModelSpec("main", bundle, bundle.manifest.main)
        options = SMALL.device

        def works(options: Any = options) -> bool | None:
            return probe.verdict_of(part.on("GPU", options)).works

        assert works()
        assert works()
        assert works(SMALL.replace(npu_window=4, npu_max_new_tokens=7).device)  # of other devices
        assert num_tried(tmp_path) == 1
        gpu(ABORT)  # a worse driver, with another version
        found = devices.find_device("GPU", "onnx")
        assert found is not None
        newer = Device(name="GPU", format="onnx", full_name=found.full_name, driver="2")
        with monkeypatch.context() as patch:
            patch.setattr(model_spec, "find_device", lambda *_: newer)
            assert works() is False
            assert works() is False
        assert num_tried(tmp_path) == 2
        assert works()  # the old driver's verdict
        assert works(SMALL.replace(main_properties={"session.intra_op.allow_spinning": "0"}).device) is False
        assert works(SMALL.replace(draft_properties={"session.intra_op.allow_spinning": "0"}).device)  # not its own
        probe.forget()
        assert works() is False
        assert works() is False
        assert num_tried(tmp_path) == 4

    def test_only_an_npu_can_be_emulated(self, openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        part = ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)
        monkeypatch.setattr(loading, "verdict_of", lambda *_: probe.Verdict(works=False, reason="it was tried"))
        emulated = SMALL.replace(properties={"NPUW_DEVICES": "CPU"}).device
        with pytest.raises(outrider.DeviceError, match="does not run on GPU: it was tried"):
            loading.compile_checked(part.on("GPU", emulated))

    @pytest.mark.slow
    def test_what_cannot_be_tried_is_no_verdict(
        self, bundle: Bundle, gpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = ModelSpec("main", bundle, bundle.manifest.main)
        odd = SMALL.replace(properties={"session.x": object()}).device
        assert probe.verdict_of(part.on("GPU", odd)).works is None
        assert (
            probe.verdict_of(part.on("GPU", SMALL.replace(precision="bf16").device)).works is None
        )  # the option's fault
        monkeypatch.setattr(probe, "child_command", lambda: None)
        verdict = probe.verdict_of(part.on("GPU", SMALL.device))
        assert verdict.works is None
        assert "no Python interpreter" in verdict.reason
        assert not (saved.FOLDER / "verdicts").exists()
        assert answers_as_it_should(load(bundle, main_device="GPU"))  # loaded as it is


@pytest.mark.parametrize(("frozen", "executable", "starts"), [
    (False, "/usr/bin/python3.11", True), (False, "C:/Python/pythonw.exe", True), (True, "/opt/app/python", False),
    (False, "C:/App/editor.exe", False), (False, "", False),
])  # fmt: skip
def test_an_app_never_starts_itself(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, executable: str, starts: bool
) -> None:
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(sys, "executable", executable)
    assert (probe.child_command() is not None) == starts


def test_the_real_child_judges_a_real_model(openvino_bundle: Bundle) -> None:
    part = ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)
    assert probe.try_apart(part.on("CPU", SMALL.device)).works
    broken = SMALL.replace(properties={"NO_SUCH_PROPERTY": "1"}).device
    verdict = probe.try_apart(part.on("CPU", broken))
    assert verdict.works is False
    assert "NO_SUCH_PROPERTY" in verdict.reason


@pytest.mark.needs("POSIX")
def test_every_ending_has_words() -> None:
    assert probe._ending(-signal.SIGKILL) == "was ended by SIGKILL"
    assert probe._ending(7) == "ended with code 7"
    assert probe._ending(0xC0000005) == "ended with code 0xc0000005"
    assert probe._ending(-1073741819) == "ended with code 0xc0000005"


class TestAuto:
    """The first GPU that runs the model, otherwise the CPU."""

    def test_a_gpu_that_works_is_taken(self, bundle: Bundle, gpu: Callable[[str], None], tmp_path: Path) -> None:
        engine = load(bundle, main_device="auto")
        assert (engine.placement.main, engine.placement.draft) == ("GPU", "GPU")
        assert engine.placement.why == "auto chooses the first GPU that runs the model, otherwise the CPU"
        assert engine.config.device.main_device == engine.config.device.draft_device == "GPU"
        assert answers_as_it_should(engine)
        assert load(bundle, main_device="auto").placement == engine.placement
        assert num_tried(tmp_path) == 2  # a child for each model, once

    @pytest.mark.slow
    def test_only_what_is_left_open_is_chosen(self, bundle: Bundle, gpu: Callable[[str], None]) -> None:
        for options, devices_of in (
            ({"main_device": "CPU", "draft_device": "auto"}, ("CPU", "GPU")),
            ({"main_device": "auto", "draft_device": "CPU"}, ("GPU", "CPU")),
            ({"main_device": "auto", "draft_device": "auto"}, ("GPU", "GPU")),
            ({"main_device": "auto", "drafter": None}, ("GPU", None)),
        ):
            placement = load(bundle, **options).placement
            assert (placement.main, placement.draft) == devices_of

    def test_a_gpu_that_fails_later_is_replaced(
        self, bundle: Bundle, gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the main model fails there. The draft model's device was not named, so it follows the main model."""

        compile_it = ModelSpec.compile

        def failing(spec: ModelSpec, *args: Any) -> Any:
            if spec.device == "GPU" and spec.is_main:
                raise outrider.DeviceError("The GPU is out of memory.")
            return compile_it(spec, *args)

        monkeypatch.setattr(ModelSpec, "compile", failing)
        with pytest.warns(outrider.DeviceWarning, match=r"The GPU is out of memory\. CPU is used instead"):
            engine = load(bundle, main_device="auto")
        assert (engine.placement.main, engine.placement.draft) == ("CPU", "CPU")
        assert engine.placement.why == "GPU and GPU cannot be used, as warned"
        assert answers_as_it_should(engine)

    def test_an_npu_has_to_be_named(self, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        part = ModelSpec("main", bundle, bundle.manifest.main)
        here = [Device(name=name, format="onnx", full_name="one") for name in ("CPU", "NPU", "NPU.0", "GPU.1")]
        monkeypatch.setattr(placement, "find_devices", lambda: here)
        monkeypatch.setattr(placement, "verdict_of", lambda *_: probe.Verdict(works=True))
        open_to_choice = SMALL.replace(main_device="auto").device
        assert placement.choose_devices(part, [], open_to_choice).main == "GPU.1"
        del here[-1]
        assert placement.choose_devices(part, [], open_to_choice).main == "CPU"

    def test_a_draft_model_of_another_format_goes_to_the_cpu(
        self, bundle: Bundle, openvino_bundle: Bundle, gpu: Callable[[str], None]
    ) -> None:
        """OpenVINO has no GPU here."""
        main, draft = (ModelSpec("main", each, each.manifest.main) for each in (bundle, openvino_bundle))
        found = placement.choose_devices(main, [draft], SMALL.replace(main_device="auto").device)
        assert (found.main, found.draft) == ("GPU", "CPU")

    @pytest.mark.slow
    def test_a_verdict_that_says_nothing_is_none(
        self, bundle: Bundle, gpu: Callable[[str], None], tmp_path: Path
    ) -> None:
        load(bundle, draft_device="GPU")
        (file,) = (saved.FOLDER / "verdicts").iterdir()
        file.write_text(file.read_text().replace('"works": true', '"works": null'))
        load(bundle, draft_device="GPU")
        assert num_tried(tmp_path) == 2

    def test_a_machine_with_a_cpu_tries_nothing(self, openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "try_apart", forbidden)
        engine = load(openvino_bundle, main_device="auto", draft_device="auto")
        assert (engine.placement.main, engine.placement.draft) == ("CPU", "CPU")
        assert answers_as_it_should(engine)

    def test_openvinos_own_choice_is_named(self, openvino_bundle: Bundle) -> None:
        engine = load(openvino_bundle, main_device="AUTO")
        assert engine.config.device.main_device == engine.placement.main == "CPU"


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("this was not to be called")


class TestRoles:
    """Options of each model."""

    @pytest.mark.slow  # quick tests may have one processor only
    def test_threads_and_properties_of_each(self, openvino_bundle: Bundle) -> None:
        engine = load(
            openvino_bundle,
            num_threads=2,
            draft_num_threads=1,
            properties={"ENABLE_CPU_PINNING": False},
            main_properties={"SCHEDULING_CORE_TYPE": "PCORE_ONLY"},
            draft_properties={"ENABLE_CPU_PINNING": True, "ENABLE_CPU_RESERVATION": True},
        )
        names = ("INFERENCE_NUM_THREADS", "ENABLE_CPU_PINNING", "ENABLE_CPU_RESERVATION")
        found = {
            role: [backend._compiled.get_property(name) for name in names]
            for role, model in engine.loaded.items()
            if isinstance(backend := model.backend, OpenVINOPaged)
        }
        assert found == {
            "main": [min(2, os.cpu_count() or 1), False, False],
            "draft": [1, True, True],
        }
        assert answers_as_it_should(engine)
        del engine
        gc.collect()  # release the core that is reserved

    def test_on_onnxruntime(self, bundle: Bundle) -> None:
        engine = load(bundle, num_threads=2, draft_num_threads=1, main_properties={AFFINITIES: "2"})
        prints = [engine.loaded[role].backend.fingerprint for role in ("main", "draft")]
        assert [found["threads"] for found in prints] == ["2", "1"]
        assert [found.get(AFFINITIES) for found in prints] == ["2", None]
        with pytest.raises(
            outrider.OptionError, match=r"pins 2 threads, and has to pin num_threads - 1.*num_threads=2"
        ):
            load(bundle, num_threads=2, properties={AFFINITIES: "1;2"})

    @pytest.mark.parametrize("option", ["main_properties", "draft_properties"])
    def test_a_property_for_another_library_is_refused(self, tmp_path: Path, option: str) -> None:
        formats: tuple[Format, Format] = ("onnx", "openvino") if option == "main_properties" else ("openvino", "onnx")
        mixed = save_toy_bundle(tmp_path / "mixed", formats=formats)
        with pytest.raises(outrider.OptionError, match=f"{option} has 'ENABLE_CPU_PINNING', which is for models in op"):
            load(mixed, **{option: {"ENABLE_CPU_PINNING": True}})
        other = {"main_properties": "draft_properties", "draft_properties": "main_properties"}[option]
        assert answers_as_it_should(load(mixed, **{other: {"ENABLE_CPU_PINNING": True}}))

    def test_of_a_role_they_are_everyones(self) -> None:
        config = SMALL.replace(num_threads=4, properties={"A": 1, "B": 1}, draft_properties={"B": 2, "C": 3}).device
        assert config.of("main").properties == {"A": 1, "B": 1}
        assert config.of("draft").properties == {"A": 1, "B": 2, "C": 3}
        assert config.of("draft").num_threads == 4
        assert config.of("draft").of("draft") == config.of("draft")


AFFINITIES = "session.intra_op_thread_affinities"


class TestCompiledCache:
    """The folder of OpenVINO's compiled models."""

    def folder(self, bundle: Bundle, device: str, **options: Any) -> Path | None:
        part = ModelSpec("main", bundle, bundle.manifest.main)
        folder = part.on(device, SMALL.replace(**options).device).compile_options.properties.get("CACHE_DIR")
        return None if folder is None else Path(folder)

    def test_it_is_for_devices_that_can_read_it(self, openvino_bundle: Bundle, bundle: Bundle, tmp_path: Path) -> None:
        assert self.folder(openvino_bundle, "CPU") is None
        folder = self.folder(openvino_bundle, "GPU")
        assert folder is not None
        assert folder.parent == saved.FOLDER / "compiled"
        own = self.folder(openvino_bundle, "GPU", compiled_cache=str(tmp_path))
        assert own == tmp_path / folder.name
        others = ({"precision": "f16"}, {"cache_precision": "u8"}, {"properties": {"A": 1}}, {"num_threads": 2})
        names = {self.folder(openvino_bundle, device, **o) for o in ({}, *others) for device in ("GPU", "NPU")}
        assert len(names) == 10  # OpenVINO does not look at all of them
        assert self.folder(openvino_bundle, "GPU", compiled_cache="off") is None
        assert self.folder(openvino_bundle, "GPU", properties={"CACHE_DIR": "mine"}) == Path("mine")
        assert self.folder(bundle, "GPU") is None


class FakeCore:
    """A GPU as OpenVINO describes one."""

    available_devices = ("CPU", "GPU")

    def __init__(self, **properties: Any) -> None:
        self.properties = {
            "FULL_DEVICE_NAME": "Fake Arc",
            "DEVICE_TYPE": "Type.INTEGRATED",
            "OPTIMIZATION_CAPABILITIES": ["FP32", "FP16", "INT8"],
            "GPU_DRIVER_VERSION": "31.0",
            "GPU_DEVICE_TOTAL_MEM_SIZE": 1000,
            "GPU_MEMORY_STATISTICS": {"cl_mem": 100, "usm_device": 200, "usm_host": 300},
        } | properties

    def get_property(self, device: str, name: str) -> Any:
        return [*self.properties] if name == "SUPPORTED_PROPERTIES" else self.properties[name]


class Broken(FakeCore):
    """A GPU with a broken driver."""

    def get_property(self, device: str, name: str) -> Any:
        raise RuntimeError("no driver")


class TestGpu:
    """GPUs are used as in OpenVINO GenAI. Tested on a fake."""

    def test_its_memory_is_counted(self) -> None:
        core: Any = FakeCore()
        assert devices.free_memory(core, "GPU") == 1000 - 660
        core = FakeCore(DEVICE_TYPE="Type.DISCRETE")
        assert devices.free_memory(core, "GPU") == 1000 - 330
        assert devices.free_memory(core, "NPU") is None
        assert devices._openvino_device(Broken(), "GPU").why_not("main") == "its properties cannot be read: no driver"
        found = devices._openvino_device(core, "GPU")
        assert (found.memory, found.free, found.driver) == (1000, 670, "31.0")
        assert found.precisions == ("f32", "f16", "int8")
        assert found.why_not("main") is None

    def test_the_cache_is_made_in_its_memory(self, openvino_bundle: Bundle) -> None:
        backend = OpenVINOPaged(openvino_bundle.model_path(openvino_bundle.manifest.main), vocab_size=40)
        made: list[tuple[str, list[int]]] = []

        class Context:
            def create_tensor(self, kind: ov.Type, shape: ov.Shape, properties: dict[str, Any]) -> ov.Tensor:
                made.append((kind.get_type_name(), list(shape)))
                return ov.Tensor(kind, shape)

        class Compiled:
            def get_context(self) -> Context:
                return Context()

        backend.device, backend._compiled = "GPU", Compiled()
        backend.allocate(10 * backend.block_size)
        ports = backend._caches.values()
        # The rest is for the one that is there twice when it grows. One is for padding.
        num_blocks = 10 * len(ports) // (len(ports) + 1) + 1
        assert made == [
            (
                port.get_element_type().get_type_name(),
                [num_blocks, *(port.partial_shape[a].get_length() for a in (1, 2, 3))],
            )
            for port in ports
        ]

    def test_more_than_there_is_is_refused_up_front(self, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = load(bundle)
        backends = [model.backend for model in engine.loaded.values()]
        monkeypatch.setattr(devices, "system_memory", lambda: (10**6, 10**6))
        with pytest.raises(
            outrider.DeviceError, match=r"CPU has 0.00 GB of memory, and the cache may take .* Lower cache"
        ):
            devices.check_room(backends, 10**5)
        devices.check_room(backends, 100)
        monkeypatch.undo()
        core: Any = FakeCore()
        monkeypatch.setattr(ov, "Core", lambda: core)
        backend = engine.loaded["main"].backend  # 256 bytes a token, 64 of them keys of a layer
        monkeypatch.setattr(backend, "device", "GPU")
        monkeypatch.setattr(type(backend), "runtime", "OpenVINO")
        with pytest.raises(outrider.DeviceError, match="GPU has 0.00 GB of memory left, and the cache may take"):
            devices.check_room([backend], 2)
        devices.check_room([backend], 1)
        core.properties["GPU_DEVICE_MAX_ALLOC_MEM_SIZE"] = 63
        with pytest.raises(outrider.DeviceError, match="GPU makes no tensor above 0.00 GB, and the keys of"):
            devices.check_room([backend], 1)


class TestCommand:
    """`outrider devices`."""

    def test_devices_are_listed_with_reasons(self, capsys: pytest.CaptureFixture[str]) -> None:
        from outrider.cli import run

        assert run(["devices"]) == 0
        printed = capsys.readouterr().out
        assert "OpenVINO" in printed
        for line in (
            "CPU (OpenVINO): whether it is bit-exact",
            "CPU (ONNX Runtime): ",
            "DML (ONNX Runtime): ",
        ):
            assert line in printed
        for name, value in processor.find_processor().description.items():
            assert f"{name}: {value}" in " ".join(printed.split())  # long lines are folded

    @pytest.mark.slow
    def test_a_bundle_is_tried(
        self, bundle: Bundle, gpu: Callable[[str], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        import json

        from outrider.cli import run

        def run_json(*arguments: str) -> dict[str, Any]:
            assert run(["devices", str(bundle.folder), "--json", *arguments]) == 0
            printed: dict[str, Any] = json.loads(capsys.readouterr().out)
            return printed

        gpu(ABORT)
        found = run_json()
        rows = {(row["role"], row["device"]): row for row in found["models"]}
        assert rows["main", "CPU"]["works"] is True
        assert rows["main", "GPU"]["works"] is False
        assert "the process that tested it" in rows["main", "GPU"]["reason"]
        assert rows["draft", "CPU"]["cache_bytes_per_token"] == 2 * 2 * 16 * 4
        assert {device["runtime"] for device in found["devices"]} == {"OpenVINO", "ONNX Runtime"}
        assert found["cores"]["threads"] == found["processor"]["cores"]["threads"] == os.cpu_count()
        assert found["placement"]["main"] == "CPU"
        gpu("")
        assert rows == {(row["role"], row["device"]): row | {"free": rows[row["role"], row["device"]]["free"]}
                        for row in run_json()["models"]}  # fmt: skip
        gpu(ABORT)
        with pytest.warns(outrider.DeviceWarning, match="does not run on GPU"):
            load(bundle, draft_device="GPU", num_threads=1)
        gpu("")
        assert run(["devices", "--again"]) == 0  # forgets that, too
        capsys.readouterr()
        assert load(bundle, draft_device="GPU", num_threads=1).placement.draft == "GPU"
        again = {(row["role"], row["device"]): row["works"] for row in run_json()["models"]}
        assert again["main", "GPU"] is again["draft", "GPU"] is True
        assert run(["devices", str(bundle.folder)]) == 0
        assert "With these options: main model on CPU, draft model on CPU (as asked for)." in capsys.readouterr().out

    def test_an_npus_cache_is_what_npuw_makes_it(self, openvino_bundle: Bundle) -> None:
        from outrider.cli.devices import _cache_precision

        part = ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)
        npu = Device(name="NPU", format="openvino", fixed=True)
        assert _cache_precision(part, npu, SMALL) == "f16"
        assert _cache_precision(part, npu, SMALL.replace(precision="f32")) == "f16"
        assert _cache_precision(part, npu, SMALL.replace(cache_precision="f32")) == "f32"
        assert _cache_precision(part, Device(name="NONE", format="openvino"), SMALL) is None  # it does not exist

    @pytest.mark.slow
    def test_a_warning_is_one_line(
        self, bundle: Bundle, gpu: Callable[[str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        from outrider.cli import run

        gpu(ABORT)
        assert run(["devices", str(bundle.folder), "--main-device", "auto"]) == 0
        printed = capsys.readouterr().err.splitlines()
        assert printed
        assert all(line.startswith("outrider: The ") and "is not chosen." in line for line in printed)


def test_without_onnxruntime_devices_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    found = [device for device in devices.find_devices() if device.format == "onnx"]
    assert len(found) == 1
    assert "not installed" in (found[0].why_not("main") or "")


def test_a_broken_onnxruntime_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outrider.models.backends.onnx_providers", None)
    found = [device for device in devices.find_devices() if device.format == "onnx"]
    assert len(found) == 1
    assert "onnxruntime cannot be imported: import of" in (found[0].why_not("main") or "")


def test_a_pair_on_the_cpu_asks_for_no_other_device(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (placement, probe):
        monkeypatch.setattr(module, "find_device", forbidden)
    with warnings.catch_warnings(action="error", category=outrider.DeviceWarning):  # nothing was replaced
        assert load(openvino_bundle).placement.draft == "CPU"


def test_a_device_is_found_by_its_name_if_it_is_there() -> None:
    assert devices.find_device("DML", "onnx") is None  # listed for the reason alone
    cpu = devices.find_device("CPU.0", "openvino")
    assert cpu is not None
    assert cpu.name == "CPU"
    assert devices.find_name("GPU", ["CPU", "GPU.0"]) == "GPU.0"
    assert devices.find_name("GPU.1", ["CPU", "GPU.0"]) is None


def test_cores_of_two_kinds_are_told_apart() -> None:
    class Core:
        def __init__(self, found: dict[str, int]) -> None:
            self.found = found

        def compile_model(self, model: ov.Model, device: str, hints: dict[str, Any]) -> "Core":
            self.kind = hints["SCHEDULING_CORE_TYPE"]
            return self

        def get_property(self, name: str) -> int:
            return self.found[self.kind]

    hybrid: Any = Core({"ANY_CORE": 14, "PCORE_ONLY": 6, "ECORE_ONLY": 8})
    assert devices.count_cores(hybrid) == {"performance": 6, "efficiency": 8, "threads": os.cpu_count()}
    even: Any = Core({"ANY_CORE": 8, "PCORE_ONLY": 4, "ECORE_ONLY": 4})
    assert devices.count_cores(even)["efficiency"] == 4
    plain: Any = Core({"ANY_CORE": 8, "PCORE_ONLY": 8, "ECORE_ONLY": 8})
    assert devices.count_cores(plain) == {"cores": 8, "threads": os.cpu_count()}


def test_memory_is_known() -> None:
    total, available = system_memory()
    if sys.platform == "linux":
        assert total is not None
        assert available is not None
    assert total is None or total > 2**30
    assert available is None or total is None or 0 < available < total


class TestProcessor:
    """The processor's description in reports."""

    XEON = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512f amx_tile amx_int8 amx_bf16 avx_vnni\n\n"
    ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd crc32 asimddp i8mm bf16 sve\nCPU part\t: 0xd4f\n"

    @pytest.mark.parametrize(("precision", "weights", "num_threads", "may"), [
        ("bf16", "fp16", 1, True),
        ("bf16", "F16", 1, True),  # of a GGUF file
        ("bf16", "int8", 1, False),
        ("f32", "fp16", 1, False),
        ("f16", "fp16", 1, False),  # it has no tiles for that
    ])  # fmt: skip
    def test_openvino_divides_by_zero_with_amx_and_one_thread(
        self, precision: str, weights: str, num_threads: int, may: bool
    ) -> None:
        """`tests/runtime/test_adapters.py` converts such a file, with one processor, where there is AMX."""
        xeon = processor.ProcessorFacts("A Xeon", instructions=("avx2", "amx_bf16"))
        assert processor.may_divide_by_zero(xeon, precision, weights, num_threads) == may
        assert not processor.may_divide_by_zero(processor.ProcessorFacts("another"), precision, weights, num_threads)

    def test_what_may_end_the_process_is_tried_in_another(
        self, openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = outrider.Config().replace(precision="bf16", cache_size=0.005)
        monkeypatch.setattr(loading, "may_divide_by_zero", lambda *_: True)
        monkeypatch.setattr(loading, "verdict_of", lambda *_: probe.Verdict(False, "it was ended by SIGFPE"))
        with pytest.raises(outrider.DeviceError, match=r"ended by SIGFPE. Load with precision='f32', or with more"):
            outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())

    @pytest.mark.parametrize(
        ("cpuinfo", "instructions"),
        [(XEON, "avx2 avx_vnni avx512f amx_int8 amx_bf16"), (ARM, "asimd asimddp i8mm bf16 sve"), ("", "not known")],
    )
    def test_instructions_are_those_that_kernels_choose_between(
        self, cpuinfo: str, instructions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
        assert processor.find_processor().description["instructions"] == instructions

    @pytest.mark.parametrize(("own", "files", "quota"), [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 1),
        ("0::/of/the/host\n", {"cpu.max": "350000 100000"}, 3),  # a container without a namespace of its own
        ("5:cpu,cpuacct:/a\n0::/a\n", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("5:cpu:/\n4:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ("0::/\n", {"cpu.max": "many"}, 0), ("what is this", {}, 0), (None, {}, 0),
    ])  # fmt: skip
    def test_threads_follow_the_quota_of_a_container(
        self, own: str | None, files: dict[str, str], quota: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if own is not None:
            (tmp_path / "own").write_text(own)
        monkeypatch.setattr(processor, "_CGROUPS", tmp_path)
        monkeypatch.setattr(processor, "_OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr(processor, "count_cores", lambda _: {"performance": 2, "efficiency": 2, "threads": 6})
        found = processor.find_processor()
        assert found.quota == quota
        assert ("a quota of" in found.description["processor"]) is bool(quota)
        (tmp_path / "own").write_text("0::/\n")
        (tmp_path / "cpu.max").write_text("400000 100000")
        assert processor.find_processor().quota == 0

    def test_the_system_is_asked_where_openvino_does_not_say(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ov, "Core", forbidden)
        monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "nowhere")
        found = processor.find_processor()
        assert found.name == (platform.processor() or platform.machine())
        assert (found.instructions, found.capabilities) == ((), ())
        assert found.cores == {"threads": os.cpu_count()}
        (tmp_path / "nowhere").write_text(self.XEON)
        assert processor.find_processor().name == "A Xeon"

    def test_a_limit_of_the_environment_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in processor.LIMITS:
            monkeypatch.delenv(name, raising=False)
        assert list(processor.find_processor().description) == ["processor", "instructions", "capabilities"]
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert processor.find_processor().description["ONEDNN_MAX_CPU_ISA"] == "AVX2"

    def test_a_precision_that_the_processor_lacks_is_named(self) -> None:
        class Core:
            def get_property(self, *_: str) -> list[str]:
                return ["FP32", "INT8"]

        with pytest.raises(DeviceError, match=r"cannot compute in bf16\. Load with precision='f32'"):
            processor.resolve_precisions(Core(), "CPU", "bf16", "auto")
        assert processor.resolve_precisions(Core(), "CPU", "f16", "auto") == ("f16", "f16")  # widened, not refused

    def test_windows_is_asked_for_what_it_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registry = types.ModuleType("winreg")
        opened: list[str] = []

        @contextlib.contextmanager
        def open_key(root: str, place: str) -> Iterator[str]:
            opened.append(f"{root}: {place}")
            yield "key"

        vars(registry).update(
            HKEY_LOCAL_MACHINE="machine", OpenKey=open_key, QueryValueEx=lambda _, name: (f"{name} ", 1)
        )
        kernel = types.SimpleNamespace(IsProcessorFeaturePresent=lambda number: number in (40, 19))
        monkeypatch.setitem(sys.modules, "winreg", registry)
        monkeypatch.setattr(processor, "ctypes", types.SimpleNamespace(CDLL=lambda _: kernel))
        monkeypatch.setattr(sys, "platform", "win32")
        assert processor._ask_windows() == ("ProcessorNameString", {"avx2", "asimd"})
        assert opened == [r"machine: HARDWARE\DESCRIPTION\System\CentralProcessor\0"]

    def test_macos_is_asked_for_what_it_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = "machdep.cpu.brand_string: Apple M9\nhw.optional.AdvSIMD: 1\nhw.optional.arm.FEAT_I8MM: 1\n"
        done = types.SimpleNamespace(stdout=said + "hw.optional.arm.FEAT_BF16: 0\n")
        monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
        monkeypatch.setattr(sys, "platform", "darwin")
        assert processor._ask_macos() == ("Apple M9", {"asimd", "i8mm"})


def test_a_model_without_cores_is_said_so() -> None:
    raised = RuntimeError("Check '!proc_type_table.empty()' failed: proc_type_table is empty. No CPU resources!")
    said = str(compile_error(ov.Core(), "CPU", "draft", raised))
    assert said.startswith("CPU has no cores for draft: ENABLE_CPU_RESERVATION keeps")
    assert "Lower num_threads" in said
