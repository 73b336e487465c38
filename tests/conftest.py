import gc
import logging
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import cast

import hypothesis
import platformdirs
import pytest
from filelock import FileLock

import outrider
from needs import PROCESSOR, what_is_missing
from outrider.bundle import Bundle, Format
from outrider.system import saved
from outrider.testing import save_toy_bundle
from toys import load_toy

hypothesis.settings.register_profile(
    "outrider",
    deadline=None,  # other work on the machine is no failure
    derandomize="OUTRIDER_EXAMPLES" not in os.environ,  # a change is judged by the same examples each time
)
hypothesis.settings.load_profile("outrider")


def pytest_configure(config: pytest.Config) -> None:
    """Each process of a run keeps to its share of the processors: threads of two that wait for each other cost a third.

    Slow tests have all: what is claimed of real models is claimed of several threads.
    """
    worker = getattr(config, "workerinput", None)
    if worker and "not slow" in config.option.markexpr and hasattr(os, "sched_setaffinity"):
        processors, count = sorted(os.sched_getaffinity(0)), worker["workercount"]
        os.sched_setaffinity(0, processors[int(worker["workerid"][2:]) % count :: count] or processors)


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage takes a third of a second, at each load of a model."""
    gc.collect()
    gc.freeze()


REAL_MODELS = {"smollm2", "smollm2_drafted", "smollm2_pair", "smollm2_onnx"}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real models are slow, and cases beyond `fast_cases`; what asks for more than AVX2 is marked."""
    cases = defaultdict[tuple[pytest.Collector | None, str, int], list[pytest.Item]](list)
    for item in items:
        if mark := item.get_closest_marker("fast_cases"):
            cases[item.parent, item.name.split("[")[0], *mark.args].append(item)
        if REAL_MODELS & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")
        if any(PROCESSOR & {*mark.args} for mark in item.iter_markers("needs")):
            item.add_marker("processor")
    for (*_, count), found in cases.items():  # as far apart as they can be: tables have what is alike side by side
        fast = {i * len(found) // count for i in range(count)}
        for i, item in enumerate(found):
            if i not in fast:
                item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test needs comes first: none fails for want of it, whatever its fixtures do."""
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        if missing := what_is_missing(name):
            pytest.skip(f"needs {missing}")


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """Programs that a shell starts in the background ignore Ctrl-C, and so do those that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is found out about toys does not pile up in the user's cache. Child processes share what is found out."""
    saved.FOLDER = tmp_path_factory.mktemp("saved")
    os.environ["OUTRIDER_CACHE"] = str(saved.FOLDER)


@pytest.fixture(autouse=True)
def seen_log() -> None:
    """`caplog` sees our log, also after a command that has run in this process keeps it to itself."""
    logging.getLogger("outrider").propagate = True


@pytest.fixture(autouse=True)
def no_records() -> None:
    """What drafters have earned in one test is not known to the next."""
    saved.forget("records")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with all that a real one has, ready in a second: a random model of a GGUF file, tokenizer, template."""
    pytest.importorskip("gguf", reason="writes the file that the bundle is made of")
    from outrider_export import export_bundle
    from tiny import write_checkpoint, write_gguf

    root = tmp_path_factory.mktemp("tiny")
    write_checkpoint(root / "checkpoint")
    write_gguf(root / "tiny.gguf", root / "checkpoint", "Q4_1", "qwen2", {})
    return export_bundle(root / "tiny.gguf", output=root / "bundle", weights="int4").folder


@pytest.fixture(scope="session")
def seeing(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an encoder of images, a toy."""
    from tiny_vision import add_toy_encoder

    return add_toy_encoder(tiny, tmp_path_factory.mktemp("seeing") / "bundle").folder


@pytest.fixture(scope="session")
def tiny_pair(tiny: Path) -> Path:
    """The same model as main and as draft model."""
    from outrider_export import export_bundle

    file = tiny.with_name("tiny.gguf")
    return export_bundle(file, file, output=tiny.with_name("pair"), weights="int4", draft_weights="int4").folder


@pytest.fixture(scope="session", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    """A bundle as users have them: a tiny one, and among the slow tests the demo's."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's real model: fetched and exported once, as `outrider demo` does, without its drafter."""
    return make_demo_bundle(drafter=False)


def make_demo_bundle(*, drafter: bool) -> Path:
    """What `outrider demo` makes, in the user's cache; one process of a run makes it, the others wait."""
    from outrider.cli.demo import demo_bundle

    folder = platformdirs.user_cache_path("outrider", appauthor=False)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "demo.lock"):
        return demo_bundle(folder, quiet=True, drafter=drafter)


@pytest.fixture(scope="session")
def smollm2_drafted() -> Path:
    """The same with its drafter."""
    return make_demo_bundle(drafter=True)


@pytest.fixture(scope="session")
def smollm2_pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as main and as draft model: a pair that always agrees."""
    from outrider_export import export_bundle
    from outrider_export.bundles.demo_model import FILE

    checkpoint = smollm2.parents[1] / FILE
    output = tmp_path_factory.mktemp("pair") / "bundle"
    return export_bundle(checkpoint, checkpoint, output=output, weights="int4", draft_weights="int4").folder


@pytest.fixture(scope="session")
def smollm2_onnx(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in ONNX, in 8 bits."""
    from outrider_export import export_bundle
    from outrider_export.bundles.demo_model import FILE

    output = tmp_path_factory.mktemp("onnx") / "bundle"
    return export_bundle(smollm2.parents[1] / FILE, output=output, weights="int8", format="onnx").folder


# Main and draft model: each backend for both, and each beside the other.
FORMATS: list[tuple[Format, Format]] = [
    ("openvino", "openvino"), ("onnx", "onnx"), ("openvino", "onnx"), ("onnx", "openvino"),
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of what backends promise, marked every_format, run with all pairs, of which the mixed ones are slow.

    Others run in OpenVINO, and slow in ONNX. What is marked any_format runs in ONNX alone, which is compiled in a tenth
    of the time.
    """
    if "toy_bundle" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        fast = FORMATS[:2] if marked("every_format") else [FORMATS[1]] if marked("any_format") else [FORMATS[0]]
        slow = FORMATS[2:] if marked("every_format") else [] if marked("any_format") else [FORMATS[1]]
        pairs = [pytest.param(pair, id="-".join(pair)) for pair in fast]
        pairs += [pytest.param(pair, id="-".join(pair), marks=pytest.mark.slow) for pair in slow]
        metafunc.parametrize("toy_bundle", pairs, indirect=True, scope="session")


@pytest.fixture(scope="session")
def toy_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A real main and draft model, random and tiny: OpenVINO's, and other pairs of formats."""
    if request.param == FORMATS[0]:
        return cast("Bundle", request.getfixturevalue("openvino_bundle"))
    return save_toy_bundle(tmp_path_factory.mktemp("toy"), formats=request.param)


@pytest.fixture(scope="session")
def openvino_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A toy bundle for what is OpenVINO's alone."""
    return save_toy_bundle(tmp_path_factory.mktemp("openvino"))


@pytest.fixture(scope="session")
def openvino_engine(openvino_bundle: Bundle) -> outrider.Engine:
    """An engine for what does not depend on the backend."""
    return load_toy(openvino_bundle)


@pytest.fixture(scope="session")
def toy_engine(toy_bundle: Bundle) -> outrider.Engine:
    """The toy bundle, ready; room for some thousand tokens."""
    return load_toy(toy_bundle)
