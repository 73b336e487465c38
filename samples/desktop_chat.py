"""A chat window: answers stream in and can be cancelled, and are timed with and without drafting.

pip install ".[samples]"
python samples/desktop_chat.py my-pair
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from PySide6 import QtCore, QtGui, QtWidgets
except ImportError as error:
    sys.exit(f'{error}. Run: pip install ".[samples]"')

import outrider

if TYPE_CHECKING:
    from collections.abc import Callable

STYLE = """
QWidget { color: #1c2233; background: #f6f7fb; font-size: 14px; }
QLabel[role="user"] { background: #3f51b5; color: white; border-radius: 12px; padding: 10px 14px; }
QTextBrowser { background: white; border: 1px solid #dfe3ee; border-radius: 12px; padding: 8px 10px; }
QLineEdit { background: white; border: 1px solid #c3c9da; border-radius: 8px; padding: 7px; }
QPushButton { background: #e0e5f4; border: 2px solid transparent; border-radius: 8px; padding: 6px 14px; }
QPushButton#send { background: #3f51b5; color: white; }
QPushButton:checked { background: #c5cdea; }
QPushButton:disabled, QPushButton#send:disabled { background: #eceef4; color: #777e91; }
QLineEdit:focus, QPushButton:focus { border: 2px solid #7986cb; }
QProgressBar { border: none; background: #dfe3ee; max-height: 4px; }
QProgressBar::chunk { background: #3f51b5; }
QLabel { padding: 1px 3px; }
QLabel#error { color: #b00020; }
"""
SELECTABLE = (
    QtCore.Qt.TextInteractionFlag.TextSelectableByMouse | QtCore.Qt.TextInteractionFlag.TextSelectableByKeyboard
)


class Background(QtCore.QObject):
    """One thread for all that takes time. What it posts is called in the window's thread."""

    posted = QtCore.Signal(object)

    def __init__(self, parent: QtCore.QObject, failed: Callable[[str], None]) -> None:
        super().__init__(parent)
        self._thread, self._failed = ThreadPoolExecutor(max_workers=1), failed
        self.posted.connect(self._call, QtCore.Qt.ConnectionType.QueuedConnection)

    def start(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Call `work()` in the thread, then `then(its result)` in the window's."""
        self._thread.submit(self._run, work, then)

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the window's thread, soon. From any thread."""
        self.posted.emit(partial(function, *arguments))

    def stop(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        try:
            self.post(then, work())
        except outrider.OutriderError as error:
            self.post(self._failed, str(error))
        except Exception as error:
            self.post(self._failed, f"{type(error).__name__}: {error}")

    def _call(self, function: Callable[[], None]) -> None:
        function()


class Progress(logging.Handler):
    """Shows what Outrider logs: the first load of a bundle measures the machine, which takes a while."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage().strip())


class Answer(QtWidgets.QTextBrowser):
    """An answer as Markdown, as high as its text. HTML stays text, and no file or image is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__(openLinks=False, accessibleName="Answer")
        self.written = ""
        self.setFrameShape(QtWidgets.QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(QtCore.Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.anchorClicked.connect(self.follow)
        self.document().documentLayout().documentSizeChanged.connect(self.fit)
        self.add(text)

    def text(self) -> str:
        """What the model has written."""
        return self.written

    def add(self, text: str) -> None:
        self.written += text
        kind = QtGui.QTextDocument.MarkdownFeature
        self.document().setMarkdown(self.written, kind.MarkdownDialectGitHub | kind.MarkdownNoHTML)
        self.colour_code()

    def colour_code(self) -> None:
        """A background for blocks of code, whose lines and spaces stay as they are."""
        block, changed = self.document().begin(), QtGui.QTextBlockFormat()
        changed.setBackground(QtGui.QColor("#eef0f6"))
        while block.isValid():
            if block.blockFormat().hasProperty(QtGui.QTextFormat.Property.BlockCodeFence):
                QtGui.QTextCursor(block).mergeBlockFormat(changed)
            block = block.next()

    def fit(self, size: QtCore.QSizeF) -> None:
        bar = self.horizontalScrollBar()
        self.setFixedHeight(int(size.height()) + 20 + (bar.height() if bar.maximum() else 0))

    def follow(self, address: QtCore.QUrl) -> None:
        if address.scheme() in ("http", "https"):
            QtGui.QDesktopServices.openUrl(address)

    def loadResource(self, kind: int, name: QtCore.QUrl) -> None:  # noqa: N802, ARG002  (Qt's name)
        return None


class Window(QtWidgets.QMainWindow):
    """A conversation. options: of `outrider.load`."""

    loaded, answered = QtCore.Signal(), QtCore.Signal(object)
    compared, failed = QtCore.Signal(object), QtCore.Signal(str)

    def __init__(self, folder: str | None = None, **options: Any) -> None:
        super().__init__()
        self.folder, self.options = folder, options
        self.engine: outrider.Engine | None = None
        self.chat: outrider.Chat | None = None
        self.answering: outrider.Chat | None = None  # the conversation, or a fork of it that is timed
        self.question = ""  # that is being answered
        self.busy = self.cancelled = False
        self.background = Background(self, self.show_error)
        self.progress_log = Progress(partial(self.background.post, self.show_status))
        logging.getLogger("outrider").setLevel(logging.INFO)
        logging.getLogger("outrider").addHandler(self.progress_log)
        self.build()
        self.show_status("Open a folder that 'outrider export' wrote.")
        if folder is not None:
            self.load(folder)

    def choose(self) -> None:
        if folder := QtWidgets.QFileDialog.getExistingDirectory(self, "Open a bundle"):
            self.load(folder)

    def load(self, folder: str, **devices: str) -> None:
        """Load a bundle; the same one on other devices goes on with the conversation."""
        self.begin(f"Loading {folder} …")
        self.background.start(partial(self.open, folder, devices), self.show_loaded)

    def reload(self) -> None:
        pickers = {"main_device": self.main_device, "draft_device": self.draft_device}
        self.load(self.folder or "", **{name: each.currentText() for name, each in pickers.items() if each.count()})

    def open(self, folder: str, devices: dict[str, str]) -> list[str]:
        """Load a bundle, in the thread. Returns warnings."""
        outrider.read_bundle(folder)  # a wrong folder shall not close the engine
        if self.engine is not None:
            self.engine.close()  # first, to make room
            self.engine = None
        with warnings.catch_warnings(record=True, action="always") as told, tempfile.TemporaryDirectory() as kept:
            engine = outrider.load(folder, **{**self.options, **devices})
            chat = engine.chat()
            if self.chat is not None and folder == self.folder:
                self.chat.save(file := Path(kept, "chat.json"))
                chat = engine.load_chat(file)
        self.devices = outrider.find_devices()
        self.engine, self.chat, self.folder = engine, chat, folder
        return [str(each.message) for each in told]

    def send(self) -> None:
        text = self.input.text().strip()
        if text and self.engine is not None and not self.busy:
            self.input.clear()
            self.answer(text)

    def retry(self) -> None:
        """Answer the last message again: in other words, if the temperature is not 0."""
        if self.chat is not None:
            (message,) = self.chat.rewind()
            self.show_talk()
            self.answer(message["content"])

    def answer(self, text: str) -> None:
        if (chat := self.chat) is None:
            return
        self.question = text
        self.show_message("user", text)
        self.growing = self.show_message("assistant", "")
        options = {"drafter": "auto" if self.drafting.isChecked() else None, "temperature": self.temperature.value()}
        self.begin("Reading …", chat)
        self.background.start(partial(self.stream, chat, text, options), self.show_result)

    def stream(self, chat: outrider.Chat, text: str, options: dict[str, Any]) -> outrider.Result | None:
        began = 0.0
        for chunk in chat.stream(text, **options):
            if self.cancelled:  # before the answer began
                chat.cancel()
            began = began or time.perf_counter()
            seconds, count = time.perf_counter() - began, chunk.stats.num_generated_tokens
            speed = f", {(count - 1) / seconds:.1f} a second" if count > 1 and seconds else ""
            self.background.post(self.show_piece, chunk.text, f"{count} tokens{speed}")
        return chunk.result

    def compare(self) -> None:
        if self.chat is not None:
            self.begin("Answering again, without and with drafting …", self.chat)
            self.background.start(partial(self.answer_twice, self.chat), self.show_comparison)

    def answer_twice(self, chat: outrider.Chat) -> list[outrider.Result]:
        """The last answer again, without and with drafting, from the same seed. Stops when it is cancelled.

        What was answered before is not copied: that would be faster than any new answer.
        """
        results: list[outrider.Result] = []
        for drafter in (None, "auto"):
            self.answering = chat.fork()
            if not self.cancelled:
                results.append(self.answering.retry(drafter=drafter, seed=chat.turns[-1].seed, earlier_answers=False))
        return results

    def cancel(self) -> None:
        """End the answer. What there is of it stays."""
        self.cancelled = True
        if self.answering is not None:
            self.answering.cancel()

    def show_loaded(self, told: list[str]) -> None:
        if self.engine is None:
            return
        manifest, placement = self.engine.bundle.manifest, self.engine.placement
        self.main_device.clear()
        self.draft_device.clear()
        models = [(self.main_device, "main", manifest.main, placement.main)]
        models += [(self.draft_device, "draft", each.model, placement.draft or "") for each in manifest.drafters[:1]]
        for picker, role, model, current in models:
            for device in (each for each in self.devices if each.format == model.format):
                picker.addItem(device.name)
                item = picker.model().item(picker.count() - 1)
                item.setEnabled(device.why_not(role) is None)
                item.setToolTip(device.why_not(role) or device.full_name)
            picker.setCurrentText(current)
        self.setWindowTitle(f"{Path(self.engine.bundle.folder).name} – Outrider")
        self.show_talk()
        self.end(" ".join(told) or f"Ready. Drafters: {', '.join(self.engine.drafters)}.")
        self.loaded.emit()

    def show_talk(self) -> None:
        while self.talk.count() > 1:
            self.talk.takeAt(0).widget().deleteLater()
        for message in self.chat.messages if self.chat else ():
            self.show_message(message["role"], message["content"])

    def show_message(self, role: str, text: str) -> QtWidgets.QLabel | Answer:
        if role == "user":
            label = QtWidgets.QLabel(text, wordWrap=True, textFormat=QtCore.Qt.TextFormat.PlainText)
            label.setAccessibleName("Your message")
            label.setTextInteractionFlags(SELECTABLE)
        else:
            label = Answer(text)
        label.setProperty("role", role)
        row = QtWidgets.QWidget()
        layout = QtWidgets.QHBoxLayout(row)
        layout.setContentsMargins(80 if role == "user" else 4, 4, 4 if role == "user" else 80, 4)
        layout.addWidget(label)
        self.talk.insertWidget(self.talk.count() - 1, row)
        return label

    def show_piece(self, text: str, stats: str) -> None:
        self.growing.add(text)
        self.show_status(stats)

    def show_result(self, result: outrider.Result) -> None:
        cancelled = "Cancelled. " if result.finish_reason == "cancelled" else ""
        self.end(f"{cancelled}{result.stats}{'' if result.stats.num_draft_tokens else ', nothing drafted'}")
        self.answered.emit(result)

    def show_comparison(self, results: list[outrider.Result]) -> None:
        if len(results) < 2 or any(each.finish_reason == "cancelled" for each in results):
            self.end("The comparison was cancelled.")
        else:
            plain, drafting = (each.stats.tokens_per_second for each in results)
            same = "the same text" if results[0].token_ids == results[1].token_ids else "ANOTHER TEXT"
            self.end(f"Without drafting {plain:.1f} tokens/s, with drafting {drafting:.1f} tokens/s: {same}")
        self.compared.emit(results)

    def show_status(self, text: str) -> None:
        self.status.setText(text)

    def show_error(self, text: str) -> None:
        """Show what went wrong, in one line."""
        self.input.setText(self.question or self.input.text())
        self.show_talk()  # without the answer that failed
        self.end("")
        self.error.setText(" ".join(text.split()))
        self.error.show()
        self.failed.emit(self.error.text())

    def begin(self, status: str, answering: outrider.Chat | None = None) -> None:
        self.busy, self.cancelled, self.answering = True, False, answering
        self.error.hide()
        self.show_status(status)
        self.enable()

    def end(self, status: str) -> None:
        self.busy, self.answering, self.question = False, None, ""
        self.show_status(status)
        self.enable()
        self.input.setFocus()

    def enable(self) -> None:
        ready = self.engine is not None and not self.busy
        answered = ready and self.chat is not None and bool(self.chat.turns)
        self.send_button.setEnabled(ready)
        self.retry_button.setEnabled(answered)
        self.compare_button.setEnabled(answered)
        self.cancel_button.setEnabled(self.answering is not None)
        self.open_button.setEnabled(not self.busy)
        for picker in (self.main_device, self.draft_device):
            picker.setEnabled(not self.busy and picker.count() > 0)
        self.progress.setVisible(self.busy)

    def build(self) -> None:
        self.resize(900, 640)
        self.setStyleSheet(STYLE)
        self.main_device, self.draft_device = self.picker("Main model's device"), self.picker("Draft model's device")
        self.temperature = QtWidgets.QDoubleSpinBox(maximum=2, singleStep=0.1, accessibleName="Temperature")
        self.drafting = QtWidgets.QCheckBox("&Drafting", checked=True)
        self.input = QtWidgets.QLineEdit(placeholderText="Write a message", accessibleName="Message")
        self.input.returnPressed.connect(self.send)
        self.open_button = self.button("&Open…", self.choose, "Ctrl+O")
        self.send_button = self.button("&Send", self.send, "Ctrl+Return")
        self.send_button.setObjectName("send")
        self.cancel_button = self.button("Cancel", self.cancel, "Esc")
        self.retry_button = self.button("&Retry", self.retry, "Ctrl+R")
        self.compare_button = self.button("&Compare", self.compare, "Ctrl+K")
        self.progress = QtWidgets.QProgressBar(minimum=0, maximum=0, textVisible=False, accessibleName="Working")
        self.error = QtWidgets.QLabel(objectName="error", accessibleName="Error", wordWrap=True, visible=False)
        self.status = QtWidgets.QLabel(accessibleName="Status", wordWrap=True)
        inside = QtWidgets.QWidget()
        self.talk = QtWidgets.QVBoxLayout(inside)
        self.talk.addStretch()
        scroll = QtWidgets.QScrollArea(widgetResizable=True, accessibleName="Conversation")
        scroll.setFrameShape(QtWidgets.QFrame.Shape.NoFrame)
        scroll.setWidget(inside)
        bar = scroll.verticalScrollBar()
        bar.rangeChanged.connect(lambda _, maximum: bar.setValue(maximum))
        self.settings = QtWidgets.QWidget(visible=False)
        self.settings_button = self.button("Se&ttings", self.show_settings, "Ctrl+,")
        self.settings_button.setCheckable(True)
        named = (("&Main", self.main_device), ("Dra&ft", self.draft_device), ("T&emperature", self.temperature))
        fields = QtWidgets.QHBoxLayout(self.settings)
        fields.setContentsMargins(0, 0, 0, 0)
        for text, widget in named:
            fields.addWidget(QtWidgets.QLabel(text, buddy=widget))
            fields.addWidget(widget, widget is not self.temperature)
        top = (self.open_button, QtWidgets.QLabel(), self.drafting, self.settings_button)
        buttons = (self.send_button, self.cancel_button, self.retry_button, self.compare_button)
        page = QtWidgets.QWidget()
        rows = QtWidgets.QVBoxLayout(page)
        for row in (
            top,
            [self.settings],
            [self.progress],
            [scroll],
            [self.error],
            [self.input, *buttons],
            [self.status],
        ):
            line = QtWidgets.QHBoxLayout()
            for widget in row:
                line.addWidget(widget, widget in (self.input, top[1]))
            rows.addLayout(line, scroll in row)
        self.setCentralWidget(page)
        self.enable()

    def show_settings(self) -> None:
        self.settings.setVisible(self.settings_button.isChecked())

    def button(self, text: str, action: Callable[[], None], keys: str) -> QtWidgets.QPushButton:
        name = text.replace("&", "").removesuffix("…")
        button = QtWidgets.QPushButton(text, accessibleName=name, toolTip=f"{name} ({keys})")
        button.clicked.connect(action)
        QtGui.QShortcut(QtGui.QKeySequence(keys), self).activated.connect(button.click)
        return button

    def picker(self, name: str) -> QtWidgets.QComboBox:
        picker = QtWidgets.QComboBox(accessibleName=name, toolTip=name, placeholderText="no model")
        picker.activated.connect(self.reload)
        return picker

    def closeEvent(self, event: QtGui.QCloseEvent) -> None:  # noqa: N802  (Qt's name)
        self.hide()
        self.cancel()
        self.background.stop()
        logging.getLogger("outrider").removeHandler(self.progress_log)
        if self.engine is not None:
            self.engine.close()
        event.accept()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", help="folder that 'outrider export' wrote")
    parser.add_argument("--once", metavar="TEXT", help="answer this, print the answer, and quit")
    args = parser.parse_args()
    app = QtWidgets.QApplication(sys.argv[:1])
    window = Window(args.bundle)
    if args.once:
        window.loaded.connect(partial(window.answer, args.once))
        window.answered.connect(lambda result: (print(result.text), app.quit()))
        window.failed.connect(lambda text: (print(text, file=sys.stderr), app.exit(1)))
    window.show()
    status = app.exec()
    window.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
