"""The log of a server that nobody reads."""

import io
import logging
import threading
import time

import pytest

from outrider.cli import progress


class Full(io.StringIO):
    """A pipe that is full until somebody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = threading.Event()

    def write(self, text: str) -> int:
        self.is_read.wait(300)
        return super().write(text)


def test_a_log_that_nobody_reads_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, log = Full(), logging.getLogger("outrider")
    monkeypatch.setattr("sys.stderr", pipe)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", log.level)
    progress.show_progress()
    shown = list(log.handlers)
    began = time.monotonic()
    with progress.shown_in_background():
        for i in range(3 * progress.MOST_WAITING):
            log.info("%d", i)
        assert time.monotonic() - began < 200  # not the 300 of the first write
        pipe.is_read.set()
    assert log.handlers == shown
    lines = [int(line) for line in pipe.getvalue().split()]
    assert progress.MOST_WAITING <= len(lines) <= progress.MOST_WAITING + 1
    assert lines[: progress.MOST_WAITING] == list(range(progress.MOST_WAITING))
    assert lines == sorted(lines)  # the last one found room when the thread had taken the first


def test_what_others_have_chosen_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("others")
    log.addHandler(progress._handler)
    log.warning("No field %s.", "a\n2026 CRITICAL \x1b[31m\x9b31m\u202e")
    try:
        raise ValueError("b\r\n2026 CRITICAL \x1b[31m")
    except ValueError:
        log.exception("It failed.")
    first, *others = capsys.readouterr().err.splitlines()
    assert first == r"No field a\n2026 CRITICAL \x1b[31m\x9b31m\u202e."
    assert others[:2] == ["It failed.", "  Traceback (most recent call last):"]
    assert others[-2:] == ["  ValueError: b", r"  2026 CRITICAL \x1b[31m"]
