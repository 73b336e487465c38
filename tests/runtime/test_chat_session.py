"""The chat program's commands: what they change, what they show, and that errors change nothing."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

import outrider
from outrider.bundle import Bundle
from outrider.cli.chat.answering import do
from outrider.cli.chat.commands import COMMANDS, reply_to
from outrider.cli.chat.session import Session, value_of
from outrider.cli.chat.sources import Pieces
from outrider.cli.chat.terminal import Commands
from outrider.cli.chat.views import DraftsView
from outrider.decoding.metrics import Stats
from outrider.decoding.results import AnswerToken, Source, TextChunk
from outrider.errors import OptionError, OutriderError, RequestError
from watching import Watcher, chat_engine, watched

SAMPLED = ("/set temperature 0.9", "/seed 4")


@pytest.fixture(scope="module")
def engine(openvino_bundle: Bundle) -> Iterator[outrider.Engine]:
    with chat_engine(openvino_bundle, max_new_tokens=24, ignore_eos=True) as engine:
        yield engine


@pytest.fixture
def session(engine: outrider.Engine) -> Session:
    return Session(engine)


def run(session: Session, *lines: str, **looks: Any) -> str:
    """What the program prints for these lines."""
    screen = Console(file=io.StringIO(), width=100, markup=False, emoji=False, highlight=False, **looks)
    for line in lines:
        do(session, line, screen, screen, ends_answers=False)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def answers(session: Session) -> list[str]:
    return [turn.text for turn in session.chat.turns]


def test_messages_are_answered_as_by_a_chat(session: Session, engine: outrider.Engine) -> None:
    printed = run(session, "hello", "why not")
    chat = engine.chat()
    assert printed.startswith(chat.send("hello").text + "\n")
    assert chat.send("why not").text in printed
    assert session.chat.turns == chat.turns
    assert "Ended after 24 tokens" in printed


def test_options_and_seeds(session: Session, engine: outrider.Engine) -> None:
    run(session, *SAMPLED, "hello")
    expected = engine.generate([{"role": "user", "content": "hello"}], temperature=0.9, seed=4)
    assert session.last
    assert (session.last.token_ids, session.last.seed) == (expected.token_ids, 4)
    assert "seed                 4" in run(session, "/stats")
    assert "now has a new seed" in run(session, "/seed off", "/set max_new_tokens 5")
    run(session, "hello")
    assert session.last.seed != 4
    assert len(session.last.token_ids) == 5
    assert "max_new_tokens=24" in run(session, "/set max_new_tokens default")
    assert run(session, "/set temperature") == "temperature=0.9\n"
    assert "0.9" in run(session, "/set")
    run(session, "/set temperature default")
    assert "no effect at temperature 0" in run(session, "/seed 3")


def test_values_as_they_are_typed() -> None:
    typed = {"0.5": 0.5, "on": True, "none": None, "[1, 2]": [1, 2], "suffix": "suffix", '{"3": 1}': {"3": 1}}
    assert {text: value_of("any", text) for text in typed} == typed
    assert value_of("stop", "5") == "5"
    assert value_of("stop", '"\\n\\n"') == "\n\n"
    assert value_of("stop", '["a", "b"]') == ["a", "b"]


@pytest.mark.parametrize(("message", "line"), [
    ("no command /hlep. Did you mean 'help'?", "/hlep"),
    ("no command /. Known: ", "/"),
    ("put a space before it", "/etc/hosts is a file"),
    ("takes no argument", "/stats now"),
    ("needs an argument: /save FILE", "/save"),
    ("needs an argument: /seed", "/seed"),
    ("temperature=-1 is not 0", "/set temperature -1"),
    ("no generation option 'temprature'. Did you mean 'temperature'", "/set temprature 1"),
    ("no generation option 'temprature'", "/set temprature"),
    ("no generation option 'temprature'", "/set temprature default"),
    ("num_threads is an option of loading", "/set num_threads 2"),
    ("no drafter 'sufix' here. Did you mean 'suffix'", "/set drafter sufix"),
    ("seed='x' is not an integer", "/seed x"),
    ("neither on nor off", "/plain maybe"),
    ("no number of turns|not a number of turns", "/rewind many"),
    ("turns=5 is not a number of turns", "/rewind 5"),
    ("nowhere.json cannot be read", "/load nowhere.json"),
    ("The message is empty", "  "),
])  # fmt: skip
def test_errors_change_nothing(session: Session, message: str, line: str) -> None:
    run(session, "hello", "/plain")
    before = session.chat.turns, dict(session.options), session.plain, session.drafts, session.last
    with pytest.raises(OutriderError, match=message):
        run(session, line)
    assert (session.chat.turns, session.options, session.plain, session.drafts, session.last) == before


def test_what_needs_a_turn_says_so(session: Session) -> None:
    for line in ("/retry", "/rewind", "/stats", "/undo"):
        with pytest.raises(RequestError, match=r"Send a message first|nothing to undo"):
            run(session, line)


def test_a_retry_takes_the_place_of_the_answer(session: Session) -> None:
    run(session, "hello", *SAMPLED, "why not")
    first = answers(session)
    assert "The same tokens, at " in run(session, "/plain on", "/retry")
    assert answers(session) == first
    assert session.last
    assert session.last.stats.num_drafts == 0
    assert "The same tokens" not in run(session, "/seed 5", "/retry")
    second = answers(session)
    assert second[0] == first[0]
    assert second[1] != first[1]
    run(session, "/undo")
    assert answers(session) == first
    run(session, "9 8 7")
    assert len(answers(session)) == 3


def test_rewinding_gives_the_message_back(session: Session) -> None:
    run(session, "hello", "why not", "9 8 7")
    assert "1 turn left" in run(session, "/rewind 2")
    assert session.unsent == "why not"
    assert len(answers(session)) == 1
    run(session, "/undo")
    assert len(answers(session)) == 3


def test_a_message_that_fails_is_not_lost(session: Session) -> None:
    run(session, "hello")
    with pytest.raises(RequestError, match="need more|exceed"):
        run(session, "why not " * 3000)
    assert session.unsent.startswith("why not why")
    assert len(answers(session)) == 1


def test_an_answer_that_is_ended_before_its_first_token_leaves_no_turn(
    session: Session, engine: outrider.Engine
) -> None:
    class Ending(Watcher):
        def entered(self, request: Any, drafter: str | None) -> None:
            assert session.cancel()

    run(session, "hello", "/set max_new_tokens 20")
    with watched(engine, Ending()):
        run(session, "why not")
    assert len(answers(session)) == 1
    assert session.unsent == "why not"
    with watched(engine, Ending()):
        session.unsent = ""
        run(session, "/retry")
    assert session.unsent == ""
    assert len(answers(session)) == 1


def test_an_answer_is_continued(session: Session) -> None:
    run(session, "/set max_new_tokens 3", "hello")
    (begun,) = session.chat.turns
    run(session, "/continue")
    (turn,) = session.chat.turns
    assert turn.text.startswith(begun.text)
    assert len(turn.answer_token_ids) > len(begun.answer_token_ids)
    run(session, "/undo")
    assert session.chat.turns == (begun,)


def test_a_retry_that_fails_leaves_the_answer(session: Session) -> None:
    run(session, "hello")
    first = answers(session)
    with pytest.raises(RequestError):
        run(session, "/set max_new_tokens 1000000", "/retry")
    assert answers(session) == first


def test_system_messages_begin_anew(session: Session, engine: outrider.Engine) -> None:
    assert "no system message" in run(session, "/system")
    run(session, "hello", "/system be kind")
    assert answers(session) == []
    printed = run(session, "hello")
    assert answers(session) == [engine.chat("be kind").send("hello").text]
    assert printed.startswith(answers(session)[0])


def test_new_keeps_the_system_message(session: Session) -> None:
    run(session, "/system be kind", "hello", "/new")
    assert (answers(session), session.system) == ([], "be kind")
    run(session, "/system off")
    assert session.system is None


def test_conversations_are_saved_and_loaded(session: Session, engine: outrider.Engine, tmp_path: Path) -> None:
    path = tmp_path / "a chat.json"
    run(session, "/system be kind", "hello", "why not", f"/save {path}")
    saved = session.chat.turns
    other = Session(engine)
    assert "Loaded 2 turns" in run(other, f"/load {path}")
    assert other.chat.turns == saved
    assert other.system == "be kind"
    run(other, "9 8", f"/save {path}")  # a conversation may be replaced
    run(session, "9 8")
    assert other.chat.turns == session.chat.turns
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="exists, and is not a conversation of this model"):
        run(session, f"/save {tmp_path / 'notes.txt'}")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_figures_are_those_of_the_result(session: Session) -> None:
    run(session, "/set drafter suffix", "/set num_assistant_tokens 4", *["the same the same the same"] * 2)
    shown, result = run(session, "/stats"), session.last
    assert result
    stats = result.stats
    assert stats.num_cached_tokens > 0
    for figure in (
        f"{stats.tokens_per_second:.1f}",
        f"{stats.tokens_per_round:.2f}",
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens",
        f"suffix, {stats.num_accepted_tokens} accepted",
        f"{stats.num_cached_tokens} of {stats.num_prompt_tokens} prompt tokens",
    ):
        assert figure in shown
    assert "nothing was drafted" in run(session, "/plain", "hello", "/stats")


@pytest.mark.parametrize(("looks", "marks"), [
    ({}, ("·", "»", "×", "±")),
    ({"force_terminal": True, "color_system": "standard", "_environ": {}},
     ("\x1b[39m", "\x1b[32m", "\x1b[4;33m", "\x1b[1;36m")),
    ({"force_terminal": True, "color_system": "standard", "_environ": {"NO_COLOR": "1"}}, ("·", "»", "×", "±")),
], ids=["marks", "colours", "NO_COLOR"])  # fmt: skip
def test_the_source_of_each_token_is_shown(looks: dict[str, Any], marks: tuple[str, ...]) -> None:
    screen = Console(file=io.StringIO(), width=100, markup=False, highlight=False, **looks)
    view = DraftsView(screen, Pieces(lambda token_ids: bytes(token_ids).decode()))
    kinds: list[Source] = ["plain", "accepted", "recovered", "bonus"]
    tokens = [AnswerToken(code, kind) for code, kind in zip(b"abcd", kinds, strict=True)]
    view.add(TextChunk("abcd", Stats(), tokens=tokens))
    view.close()
    assert isinstance(screen.file, io.StringIO)
    text, legend = screen.file.getvalue().split("\n\n" if not looks else "\n", 1)
    places = [text.index(mark + letter) for mark, letter in zip(marks, "abcd", strict=True)]
    assert places == sorted(places)
    assert all(f"{kind} 1" in re.sub(r"\x1b\[[0-9;]*m", "", legend) for kind in kinds)


def test_characters_of_several_tokens_belong_to_the_last_one() -> None:
    """The bytes of an umlaut, and a token whose end a stop string took away."""
    pieces = Pieces(lambda token_ids: bytes(token_ids).decode(errors="replace"))
    kinds: list[Source] = ["plain", "accepted", "recovered"]
    tokens = [AnswerToken(byte, kind) for byte, kind in zip("aü".encode(), kinds, strict=True)]
    assert pieces.push(TextChunk("aü", Stats(), tokens=tokens)) == [("a", "plain"), ("ü", "recovered")]
    assert pieces.push(TextChunk("rest", Stats(), tokens=[])) == [("rest", "plain")]


def test_help_names_all_commands(session: Session) -> None:
    shown = run(session, "/help")
    assert all(f"/{name} {command.argument}".strip() in shown for name, command in COMMANDS.items())
    assert reply_to(session, "/quit").ends


def test_completions(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(line: str) -> list[str]:
        found = Commands(session).get_completions(Document(line), CompleteEvent())
        return [line[: len(line) + each.start_position] + each.text for each in found]

    assert texts("/re") == ["/retry", "/rewind"]
    assert "/set temperature" in texts("/set temp")
    assert {"/set drafter auto", "/set drafter suffix", "/set drafter default"} <= {*texts("/set drafter ")}
    assert texts("/plain o") == ["/plain on", "/plain off"]
    assert texts("hello /re") == texts("/re\n") == texts("/nothing ") == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "talk.json").touch()
    assert "/load folder" in texts("/load ")
    assert texts("/load folder/t") == ["/load folder/talk.json"]
    assert texts("/load nowhere/") == []
