"""Devices: how they are found, what happens when one fails, and which options they get.

Test machines have only a CPU. Here, "GPU" is ONNX Runtime's CPU provider under another name, in this process and in the
child processes that try it.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

import outrider
from outrider.bundle import Bundle, Format
from outrider.cli import run
from outrider.errors import DeviceError
from outrider.models.backends import devices, onnx_providers, processor, registry
from outrider.models.backends.devices import Device, compile_error
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.tuning import loading, model_spec, placement, probe, trials
from outrider.models.tuning.model_spec import ModelSpec
from outrider.system import processes, saved
from outrider.testing import ToyTokenizer, save_toy_bundle

SMALL = outrider.Config().replace(cache_size=0.01)
Drive = Callable[[str], None]

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
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """A GPU. Returns a function that sets the program that its driver runs; at first an empty one."""
    monkeypatch.setattr(saved, "FOLDER", tmp_path / "saved")
    monkeypatch.setitem(onnx_providers._PROVIDERS, "GPU", onnx_providers._PROVIDERS["CPU"])

    def drive(driver: str) -> None:
        program = CHILD.format(log=str(tmp_path / "log"), driver=driver)
        monkeypatch.setattr(processes, "child_command", lambda _: [sys.executable, "-c", program])

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


ABORT = "probe.compile_model = lambda *_, **__: os.abort()"
SEGFAULT = "import ctypes; probe.compile_model = lambda *_, **__: ctypes.string_at(0)"
EXIT = "probe.compile_model = lambda *_, **__: os._exit(3)"
NOISY_EXIT = "print('driver: cannot go on'); " + EXIT
ILLEGIBLE_EXIT = r"""os.write(1, b'{"works": true, "reason": "\xff"}\n'); """ + EXIT
REFUSE = "def no(*_, **__): raise RuntimeError('no kernels for this')\nprobe.compile_model = no"


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
    def test_the_draft_model_goes_elsewhere(self, bundle: Bundle, gpu: Drive, driver: str, said: str) -> None:
        gpu(driver)
        with pytest.warns(outrider.DeviceWarning, match=f"'draft' does not run on GPU: .*{said}.* CPU is used instead"):
            engine = load(bundle, draft_device="GPU")
        assert answers_as_it_should(engine)
        assert engine.setting["draft_device"].startswith("CPU")
        assert (engine.placement.main, engine.placement.draft) == ("CPU", "CPU")
        assert engine.placement.why == "CPU and GPU cannot be used, as warned"

    def test_a_main_device_that_was_named_is_an_error(self, bundle: Bundle, gpu: Drive) -> None:
        gpu(ABORT)
        with pytest.raises(
            outrider.DeviceError,
            match="The main model does not run on GPU: .* test it again with 'outrider devices --again",
        ):
            load(bundle, main_device="GPU")

    @pytest.mark.slow
    @pytest.mark.needs("POSIX")
    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
    def test_one_that_was_ended_from_outside_is_not_blamed(self, bundle: Bundle, gpu: Drive, name: str) -> None:
        gpu(f"import signal; probe.compile_model = lambda *_, **__: os.kill(os.getpid(), signal.{name})")
        part = ModelSpec("main", bundle, bundle.manifest.main)
        verdict = probe.verdict_of(part.on("GPU", SMALL.device))
        assert verdict.works is None
        assert verdict.reason == f"the process that tested it was ended by {name}"
        gpu("")
        assert probe.verdict_of(part.on("GPU", SMALL.device)).works  # tried again

    @pytest.mark.slow
    def test_one_that_hangs_is_given_up(self, bundle: Bundle, gpu: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu("import time; probe.compile_model = lambda *_, **__: time.sleep(600)")
        monkeypatch.setattr(probe, "PATIENCE", 4.0)
        with pytest.warns(outrider.DeviceWarning, match="it was not ready after 4 seconds"):
            assert answers_as_it_should(load(bundle, draft_device="GPU"))


@pytest.mark.slow
def test_a_device_is_tried_once_and_again_when_something_has_changed(
    bundle: Bundle, gpu: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(("frozen", "executable", "starts"), [
    (False, "/usr/bin/python3.11", True), (False, "C:/Python/pythonw.exe", True), (True, "/opt/app/python", False),
    (False, "C:/App/editor.exe", False), (False, "", False),
])  # fmt: skip
def test_an_app_never_starts_itself(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, executable: str, starts: bool
) -> None:
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(sys, "executable", executable)
    assert (processes.child_command("a.module") is not None) == starts


def test_the_real_child_judges_a_real_model(openvino_bundle: Bundle) -> None:
    part = ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)
    assert probe.try_apart(part.on("CPU", SMALL.device)).works
    broken = SMALL.replace(properties={"NO_SUCH_PROPERTY": "1"}).device
    verdict = probe.try_apart(part.on("CPU", broken))
    assert verdict.works is False
    assert "NO_SUCH_PROPERTY" in verdict.reason


class TestAuto:
    """The first GPU that runs the model, otherwise the CPU."""

    def test_a_gpu_that_works_is_taken(self, bundle: Bundle, gpu: Drive, tmp_path: Path) -> None:
        engine = load(bundle, main_device="auto")
        assert (engine.placement.main, engine.placement.draft) == ("GPU", "GPU")
        assert engine.placement.why == "auto chooses the first GPU that runs the model, otherwise the CPU"
        assert engine.config.device.main_device == engine.config.device.draft_device == "GPU"
        assert answers_as_it_should(engine)
        assert load(bundle, main_device="auto").placement == engine.placement
        assert num_tried(tmp_path) == 2  # a child for each model, once

    def test_a_gpu_that_fails_later_is_replaced(
        self, bundle: Bundle, gpu: Drive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the main model fails there. The draft model's device was not named, so it follows the main model."""

        compile_it = registry.compile_model

        def failing(spec: ModelSpec, *args: Any) -> Any:
            if spec.device == "GPU" and spec.is_main:
                raise outrider.DeviceError("The GPU is out of memory.")
            return compile_it(spec, *args)

        monkeypatch.setattr(loading, "compile_model", failing)
        monkeypatch.setattr(trials, "compile_model", failing)
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

    def test_a_machine_with_a_cpu_tries_nothing(self, openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "try_apart", forbidden)
        engine = load(openvino_bundle, main_device="auto", draft_device="auto")
        assert (engine.placement.main, engine.placement.draft) == ("CPU", "CPU")
        assert answers_as_it_should(engine)


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


AFFINITIES = "session.intra_op_thread_affinities"


def compiled_folder(bundle: Bundle, device: str, **options: Any) -> Path | None:
    part = ModelSpec("main", bundle, bundle.manifest.main)
    folder = part.on(device, SMALL.replace(**options).device).compile_options.properties.get("CACHE_DIR")
    return None if folder is None else Path(folder)


def test_a_compiled_cache_is_for_devices_that_can_read_it(
    openvino_bundle: Bundle, bundle: Bundle, tmp_path: Path
) -> None:
    assert compiled_folder(openvino_bundle, "CPU") is None
    folder = compiled_folder(openvino_bundle, "GPU")
    assert folder is not None
    assert folder.parent == saved.FOLDER / "compiled"
    own = compiled_folder(openvino_bundle, "GPU", compiled_cache=str(tmp_path))
    assert own == tmp_path / folder.name
    others = ({"precision": "f16"}, {"cache_precision": "u8"}, {"properties": {"A": 1}}, {"num_threads": 2})
    names = {compiled_folder(openvino_bundle, device, **o) for o in ({}, *others) for device in ("GPU", "NPU")}
    assert len(names) == 10  # OpenVINO does not look at all of them
    assert compiled_folder(openvino_bundle, "GPU", compiled_cache="off") is None
    assert compiled_folder(openvino_bundle, "GPU", properties={"CACHE_DIR": "mine"}) == Path("mine")
    assert compiled_folder(bundle, "GPU") is None


def test_a_cache_of_more_memory_than_there_is_is_refused_up_front(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(bundle)
    backends = [model.backend for model in engine.loaded.values()]
    monkeypatch.setattr(devices, "system_memory", lambda: (10**6, 10**6))
    with pytest.raises(outrider.DeviceError, match=r"CPU has 0.00 GB of memory, and the cache may take .* Lower cache"):
        devices.check_room(backends, 10**5)
    devices.check_room(backends, 100)


class TestCommand:
    """`outrider devices`."""

    def test_devices_are_listed_with_reasons(self, capsys: pytest.CaptureFixture[str]) -> None:
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
    def test_a_bundle_is_tried(self, bundle: Bundle, gpu: Drive, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert run(["devices", str(bundle.folder)]) == 0
        assert "With these options: main model on CPU, draft model on CPU (as asked for)." in capsys.readouterr().out


def test_without_onnxruntime_devices_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    found = [device for device in devices.find_devices() if device.format == "onnx"]
    assert len(found) == 1
    assert "not installed" in (found[0].why_not("main") or "")


def test_a_pair_on_the_cpu_asks_for_no_other_device(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (placement, probe):
        monkeypatch.setattr(module, "find_device", forbidden)
    with warnings.catch_warnings(action="error", category=outrider.DeviceWarning):  # nothing was replaced
        assert load(openvino_bundle).placement.draft == "CPU"


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

    def test_a_precision_that_the_processor_lacks_is_named(self) -> None:
        class Core:
            def get_property(self, *_: str) -> list[str]:
                return ["FP32", "INT8"]

        with pytest.raises(DeviceError, match=r"cannot compute in bf16\. Load with precision='f32'"):
            processor.resolve_precisions(Core(), "CPU", "bf16", "auto")
        assert processor.resolve_precisions(Core(), "CPU", "f16", "auto") == ("f16", "f16")  # widened, not refused


def test_a_model_without_cores_is_said_so() -> None:
    raised = RuntimeError("Check '!proc_type_table.empty()' failed: proc_type_table is empty. No CPU resources!")
    said = str(compile_error(ov.Core(), "CPU", "draft", raised))
    assert said.startswith("CPU has no cores for draft: ENABLE_CPU_RESERVATION keeps")
    assert "Lower num_threads" in said
