"""The desktop sample, without a screen: `samples/desktop_chat.py`."""

import gc
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import pytest

import outrider

# Without a display server's libraries, importing the widgets fails, too.
QtWidgets = pytest.importorskip("PySide6.QtWidgets", reason="PySide6-Essentials is not installed", exc_type=ImportError)
QtCore = pytest.importorskip("PySide6.QtCore")
QtGui = pytest.importorskip("PySide6.QtGui")


SAMPLE = Path(__file__).parents[1] / "samples" / "desktop_chat.py"
OPTIONS: dict[str, Any] = {"max_new_tokens": 48, "cache_size": 0.05, "ignore_eos": True}
QUESTION, NEXT = "Say a word.", "And another?"


@pytest.fixture(scope="module")
def sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("desktop_chat", SAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def app() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QT_QPA_PLATFORM", "offscreen")
        yield QtWidgets.QApplication.instance() or QtWidgets.QApplication(["test"])
        gc.collect()  # here, in Qt's thread: of what is left of windows, none is to be freed in an engine's


def wait(app: Any, until: Callable[[], object]) -> None:
    """Let the window's events happen until something is so."""
    end = time.monotonic() + 120
    while not until():
        assert time.monotonic() < end, "the window never got there"
        app.processEvents()
        time.sleep(0.001)


@pytest.fixture
def window(app: Any, sample: ModuleType, tiny: Path) -> Iterator[Any]:
    made = sample.Window(str(tiny), **OPTIONS)
    made.show()
    wait(app, lambda: not made.busy)
    yield made
    made.close()
    made.deleteLater()  # in this thread; the garbage collector may run in an engine's
    app.sendPostedEvents(made, QtCore.QEvent.Type.DeferredDelete)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    """The answers of two turns."""
    with outrider.load(tiny, **OPTIONS) as engine:
        chat = engine.chat()
        return [chat.send(message).text for message in (QUESTION, NEXT)]


def ask(app: Any, window: Any, text: str) -> None:
    window.input.setText(text)
    window.input.returnPressed.emit()
    assert window.busy
    wait(app, lambda: not window.busy)


def shown(window: Any) -> list[tuple[str, str]]:
    """The bubbles, from top to bottom."""
    rows = (window.talk.itemAt(i).widget() for i in range(window.talk.count() - 1))
    labels = [each for row in rows for each in row.findChildren(QtWidgets.QWidget) if each.property("role")]
    return [(label.property("role"), label.text()) for label in labels]


def wait_between_pieces(window: Any, event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next answer wait for an event of the window's after each piece."""
    stream = window.chat.stream

    def slow(*args: Any, **options: Any) -> Iterator[outrider.TextChunk]:
        for chunk in stream(*args, **options):
            yield chunk
            assert event.wait(20), "the window's thread is blocked"

    monkeypatch.setattr(window.chat, "stream", slow)


def test_answers_are_those_of_a_chat(app: Any, window: Any, expected: list[str]) -> None:
    ask(app, window, QUESTION)
    assert not window.error.isVisible()
    ask(app, window, NEXT)
    assert shown(window) == [("user", QUESTION), ("assistant", expected[0]), ("user", NEXT), ("assistant", expected[1])]
    assert "a second" in window.status.text()


def test_markdown_and_code_are_shown_as_they_are(app: Any, sample: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "secret.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    answer = sample.Answer("Some **bold**, <b>x</b> and `a*b`.\n\n```python\nfor i in x:\n")
    answer.add(f"    print(i)\n```\n\n![x]({(tmp_path / 'secret.svg').as_uri()}) [y](javascript:x)")
    answer.resize(300, 10)
    answer.show()
    app.processEvents()
    lines = answer.toPlainText().split("\n")
    assert lines[0] == "Some bold, <b>x</b> and a*b."
    assert lines[1:3] == ["for i in x:", "    print(i)"]
    code = answer.document().findBlockByNumber(2)
    assert QtGui.QFontInfo(code.begin().fragment().charFormat().font()).fixedPitch()
    assert answer.height() >= answer.document().size().height()  # nothing to scroll
    assert answer.loadResource(2, QtCore.QUrl.fromLocalFile(str(tmp_path / "secret.svg"))) is None
    answer.deleteLater()


def test_cancel_and_the_next_answer(
    app: Any, window: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = Event()
    wait_between_pieces(window, cancelled, monkeypatch)
    window.input.setText(QUESTION)
    window.send_button.click()
    wait(app, lambda: window.growing.text())
    assert window.cancel_button.isEnabled()
    window.cancel_button.click()
    cancelled.set()
    wait(app, lambda: not window.busy)
    monkeypatch.undo()
    text = shown(window)[-1][1]
    assert expected[0].startswith(text)
    assert 0 < len(text) < len(expected[0])
    assert "Cancelled." in window.status.text()
    window.retry_button.click()
    wait(app, lambda: not window.busy)
    assert shown(window) == [("user", QUESTION), ("assistant", expected[0])]
    ask(app, window, NEXT)
    assert shown(window)[-1] == ("assistant", expected[1])


def test_a_cancel_before_the_answer_began(app: Any, window: Any, expected: list[str]) -> None:
    cancelled = Event()
    window.background.start(cancelled.wait, lambda _: None)  # keeps its thread
    window.input.setText(QUESTION)
    window.send_button.click()
    window.cancel_button.click()
    cancelled.set()
    wait(app, lambda: not window.busy)
    assert "Cancelled." in window.status.text()
    assert len(shown(window)[-1][1]) < len(expected[0])


def test_errors_are_a_line_in_the_window(app: Any, window: Any, tiny: Path, tmp_path: Path) -> None:
    window.input.setText("Typed")
    window.load(str(tmp_path / "nothing"))
    wait(app, lambda: not window.busy)
    assert window.error.isVisible()
    assert window.error.text().startswith("There is no folder")
    assert window.input.text() == "Typed"
    ask(app, window, "word " * 5000)  # too long for the cache
    assert window.error.isVisible()
    assert "\n" not in window.error.text()
    assert window.input.text().startswith("word word")  # to be changed
    assert not shown(window)
    ask(app, window, QUESTION)
    assert not window.error.isVisible()
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / "outrider.json").write_text("{", encoding="utf-8")
    window.load(str(broken))
    wait(app, lambda: not window.busy)
    assert "outrider.json cannot be read" in window.error.text()
    ask(app, window, NEXT)  # the engine is as it was


def test_what_can_be_used_has_a_name(window: Any) -> None:
    kinds = (QtWidgets.QPushButton, QtWidgets.QComboBox, QtWidgets.QLineEdit, QtWidgets.QDoubleSpinBox)
    inner = window.temperature.lineEdit()  # the spin box speaks for it
    for kind in kinds:
        for widget in window.findChildren(kind):
            assert widget is inner or widget.accessibleName()
            assert widget is inner or widget.focusPolicy() & QtCore.Qt.FocusPolicy.TabFocus


def test_it_starts_as_users_start_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    command = [sys.executable, str(SAMPLE), str(tiny), "--once", QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    command[2] = str(tiny / "nothing")
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.returncode == 1
    assert "There is no folder" in done.stderr
    assert "Traceback" not in done.stderr
