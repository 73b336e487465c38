"""The chat program in a terminal and as a pipe: keys, history, Ctrl-C, exit codes."""

import _thread
import errno
import io
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

import outrider
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.cli.chat.answering import joined
from outrider.cli.chat.keyboard import interruptible
from outrider.cli.chat.session import Session
from outrider.cli.chat.terminal import open_history, run_terminal, status, title_of
from outrider.decoding.metrics import Stats
from outrider.decoding.results import TextChunk
from watching import AfterCalls, chat_engine, watched

CHAT = [sys.executable, "-m", "outrider", "chat"]
CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"


@pytest.fixture(scope="module")
def engine(openvino_bundle: Bundle) -> Iterator[outrider.Engine]:
    with chat_engine(openvino_bundle, max_new_tokens=24, ignore_eos=True) as engine:
        yield engine


def typed(session: Session, keys: str, history: Path | None = None) -> str:
    """What the program prints while these keys are typed. It must have quit when they end."""
    screen = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None, markup=False)
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(keys)
        run_terminal(session, screen, history)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


@pytest.mark.parametrize(("name", "title"), [("pair", "pair"), ("model-0123456789ab", "Model.gguf")])
def test_a_cached_bundle_is_called_by_its_source(name: str, title: str) -> None:
    source = SimpleNamespace(main=SimpleNamespace(source=SimpleNamespace(id="Model.gguf")))
    assert title_of(SimpleNamespace(folder=Path(name), manifest=source)) == title  # type: ignore[arg-type]


def asked(session: Session) -> list[str]:
    return [str(turn.messages[-1]["content"]) for turn in session.chat.turns]


def test_messages_and_commands_are_typed(engine: outrider.Engine) -> None:
    session = Session(engine)
    printed = typed(session, "hello\r/stats\r\r/nonsense\r/temperatur 0.5\rwhy not\r/quit\r")
    chat = engine.chat()
    chat.send("hello")
    chat.send("why not")
    assert session.chat.turns == chat.turns
    assert "tokens per round" in printed
    assert "There is no command /nonsense." in printed
    assert "There is no command /temperatur. Did you mean 'set temperature'?" in printed


def test_messages_have_several_lines(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session, sent = Session(engine), list[str]()

    def send(message: str) -> Generator[TextChunk, None, None]:
        sent.append(message)
        yield from ()

    monkeypatch.setattr(session, "send", send)
    typed(session, f"one{ALT_ENTER}two\\\rthree\r{CTRL_D}")
    assert sent == ["one\ntwo\nthree"]


def test_what_was_typed_is_there_again_next_time(engine: outrider.Engine, tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    typed(Session(engine), f"hello\rwhy\r{CTRL_D}", file)
    if os.name != "nt":
        assert file.stat().st_mode & 0o077 == 0
    assert [*open_history(file).load_history_strings()] == ["why", "hello"]


def test_a_disk_that_fills_up_ends_no_conversation(
    engine: outrider.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileHistory, "store_string", full)
    session = Session(engine)
    typed(session, f"hello\rwhy\r{CTRL_D}", tmp_path / "history")
    assert asked(session) == ["hello", "why"]


def test_a_rewound_message_is_edited(engine: outrider.Engine) -> None:
    session = Session(engine)
    typed(session, f"hello\rwhy\r/rewind\r not\r{CTRL_D}")
    assert asked(session) == ["hello", "why not"]


def test_ctrl_c_at_the_prompt(engine: outrider.Engine) -> None:
    """Clears what is typed; twice at an empty prompt quits, if nothing comes between."""
    session = Session(engine)
    printed = typed(session, f"never{CTRL_C}hello\r{CTRL_C}never{CTRL_C}{CTRL_C}why\r{CTRL_C}{CTRL_C}not sent\r")
    assert asked(session) == ["hello", "why"]
    assert printed.count("Press Ctrl-C again to quit.") == 3


@pytest.mark.parametrize(("drafter", "at"), [(None, 1), ("suffix", 2), ("suffix", 7)])
def test_ctrl_c_ends_the_answer_and_the_next_one_is_exact(
    engine: outrider.Engine, at: int, drafter: str | None
) -> None:
    session = Session(engine)
    session.options = {"max_new_tokens": 400, "drafter": drafter}
    handler = signal.getsignal(signal.SIGINT)
    with watched(engine, AfterCalls(at, partial(_thread.interrupt_main, signal.SIGINT))):
        printed = typed(session, f"hello\r{CTRL_D}")
    assert signal.getsignal(signal.SIGINT) is handler
    turns = session.chat.turns
    if turns:
        assert turns[0].finish_reason == "cancelled"
        assert "Cancelled. The text so far stays in the conversation: /continue," in printed
        assert len(turns[0].answer_token_ids) < 400
        whole = engine.chat(max_new_tokens=400, drafter=None).send("hello")
        assert whole.text.startswith(turns[0].text)
    else:
        assert session.unsent == "hello"
    typed(session, f"{CTRL_C}/set max_new_tokens 20\rwhy not\r{CTRL_D}")
    again = engine.chat(messages=session.chat.messages[:-2], max_new_tokens=20, drafter=None)
    assert session.chat.turns[-1].text == again.send("why not").text
    typed(session, f"/retry\r{CTRL_D}")
    assert session.chat.turns[-1].text == again.turns[-1].text


def test_an_answer_that_has_not_begun_is_ended_too() -> None:
    """Ctrl-C comes before there is anything to cancel, and is not forgotten. An answer that is left is closed."""
    cancelled, closed = list[str](), list[str]()
    seen: list[str] = []

    def chunks() -> Generator[TextChunk, None, None]:
        try:
            _thread.interrupt_main(signal.SIGINT)
            yield TextChunk("", Stats())
            seen.append(" ".join(cancelled))
            yield TextChunk("end", Stats())
        finally:
            closed.append("closed")

    with interruptible(chunks(), lambda: cancelled.append("cancel")) as pieces:
        next(pieces)
        next(pieces)
        assert not closed
    assert (seen, closed) == (["cancel"], ["closed"])


def test_the_status_line(engine: outrider.Engine) -> None:
    session = Session(engine)
    assert status(session).startswith("drafter auto | greedy | 0 of ")
    session.options = {"temperature": 0.5, "seed": 3}
    session.plain = True
    list(session.send("hello"))
    assert session.last
    speed = f"{session.last.stats.tokens_per_second:.1f} tokens/s"
    assert status(session).startswith("drafter none | temperature 0.5 | ")
    assert status(session).endswith(f" | seed 3 | {speed}")


def test_lines_with_a_backslash_are_joined() -> None:
    assert [*joined(["a\n", "b\\\r\n", "c\n", "\n", "d\\"])] == ["a", "b\nc", "", "d"]


def piped(bundle: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = [*CHAT, str(bundle), "--max-new-tokens", "12", *options]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=False, encoding="utf-8")


@pytest.mark.slow
def test_a_pipe_gets_answers_as_text(tiny: Path, tmp_path: Path) -> None:
    import outrider

    path = tmp_path / "chat.json"
    done = piped(tiny, f"The quick\n\nbrown \\\nfox\n/save {path}\n", "--system", "Be terse.")
    with outrider.load(tiny) as engine:
        chat = engine.chat("Be terse.", max_new_tokens=12)
        assert done.stdout == f"{chat.send('The quick').text}\n{chat.send('brown ' + chr(10) + 'fox').text}\n"
        assert done.returncode == 0
        assert f"Saved 2 turns to {path}" in done.stderr
        resumed = piped(tiny, "jumps\n/quit\nnever\n", "--resume", str(path))
        assert resumed.stdout == chat.send("jumps").text + "\n"


@pytest.mark.slow
def test_a_pipe_ends_with_the_first_error(tiny: Path) -> None:
    done = piped(tiny, "/sead 1\nnever\n")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = [each for each in done.stderr.splitlines() if not each.startswith("Loading ")]
    assert line.startswith("outrider: There is no command /sead. Did you mean 'set seed'?")


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "b", "--system", "s", "--resume", "f"]) == 2
    assert "--resume has the conversation's own system message" in capsys.readouterr().err


@pytest.mark.needs("POSIX")
def test_the_program_in_a_pseudo_terminal(model: Path, tmp_path: Path) -> None:
    import pty

    main, side = pty.openpty()
    process = subprocess.Popen(
        [*CHAT, str(model), "--max-new-tokens", "3000", "--ignore-eos"],
        stdin=side, stdout=side, stderr=side, start_new_session=True, preexec_fn=take_terminal,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    os.close(side)
    ready = selectors.DefaultSelector()  # select.select takes no descriptor from 1024 on
    ready.register(main, selectors.EVENT_READ)
    shown = b""

    def wait_for(*texts: str) -> None:
        """Read until the program has shown these, one behind the other."""
        nonlocal shown
        for text in texts:
            while text.encode() not in shown:
                assert ready.select(300), f"no {text!r} in {shown!r}"
                shown += os.read(main, 65536)
                if b"\x1b[6n" in shown:  # where is the cursor?
                    shown = shown.replace(b"\x1b[6n", b"")
                    os.write(main, b"\x1b[1;1R")
            shown = shown[shown.index(text.encode()) + len(text.encode()) :]

    try:
        wait_for("Ctrl-D quits.", "›")
        os.write(main, b"/dra")
        wait_for("accepted, recovered, bonus or plain")  # in the menu
        os.write(main, b"\t on\r")
        wait_for("with the source of each token.", "›")
        os.write(main, b"The quick brown fox\r")
        wait_for("·")  # the first token's mark, which stands nowhere else
        os.write(main, CTRL_C.encode())
        wait_for("The text so far stays", "›")
        os.write(main, b"/set max_new_tokens 5\r")
        wait_for("max_new_tokens=5", "›")
        os.write(main, b"jumps\r")
        wait_for("Ended after 5 tokens:", "›")
        os.write(main, CTRL_D.encode())
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
        ready.close()
        os.close(main)
    typed_before = open_history(tmp_path / "outrider" / "chat-history").load_history_strings()
    assert [*typed_before] == ["jumps", "/set max_new_tokens 5", "The quick brown fox", "/drafts on"]


def take_terminal() -> None:
    """Make standard input the terminal that Ctrl-C comes from."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
