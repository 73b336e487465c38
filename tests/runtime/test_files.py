"""Files that a user names: any error is one line that names the file."""

import json
from pathlib import Path

import pytest

from outrider.cli import run
from outrider.errors import OptionError
from outrider_bench.runs.run_folder import RunFolder

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000  # Python reads no number of more than 4,300

# By the kind of file: the command that reads it, before it loads anything.
COMMANDS = {
    "config": ["generate", "no-bundle", "hello", "--config"],
    "prompts": ["tune", "no-bundle", "--prompts"],
    "trace": ["trace"],
    "reference": ["generate", "no-bundle", "hello", "--reference"],
}
EVENT = '{{"ph": "M", "pid": 1, "tid": {tid}, "name": "thread_name", "ts": 0, "args": {{"name": {name}}}}}'
LANE = EVENT.format(tid=1, name='"request"')
ROUND = (
    '{{"ph": "X", "pid": 1, "tid": 1, "name": "round", "cat": "request", "ts": {ts}, "dur": {dur}, "args": '
    '{{"tokens": {tokens}, "drafted": 1, "accepted": 1}}}}'
)
SPAN = {"ts": 1, "dur": 1, "tokens": 2}
TRACES = {name: f"[\n{LANE},\n{ROUND.format(**SPAN | {name: value})},\n]\n" for name, value in
          (("ts", "1e300"), ("dur", "-1"), ("tokens", '"two"'))}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("config", f"[generation]\nseed = {DEEP}", "it is nested too deeply"),
        ("config", f"[generation]\nseed = {DIGITS}", "a number in it has too many digits"),
        ("config", f"[generation]\nlogit_bias = {{'{DIGITS}' = 1}}", "999… is not a table of token ids"),
        # No number of digits is too many for TOML's other notations.
        ("config", f"[generation]\nmax_new_tokens = 0x{DIGITS}", "'generation.max_new_tokens' that takes more than 64"),
        ("config", f"[generation]\nstop_token_ids = [1, 0x{DIGITS}]", "'generation.stop_token_ids' that takes more"),
        ("config", b"[generation]\nstop = '\xe9'", "it is not in UTF-8"),
        ("prompts", f'{{"prompt": {DEEP}}}', "line 1, cannot be read: it is nested too deeply"),
        ("prompts", f'\n{{"prompt": "a", "id": {DIGITS}}}', "line 2, cannot be read: a number in it has too many"),
        ("prompts", '{"prompt": "a"', "line 1, cannot be read: it is no JSON: Expecting ',' delimiter, at character"),
        ("prompts", b'{"prompt": "\xe9"}', "it is not in UTF-8"),
        ("trace", f"[\n{EVENT.format(tid=1, name=DEEP)},\n]\n", "line 2, is no event of a trace: it is nested too"),
        ("trace", f"[\n{EVENT.format(tid=DIGITS, name=1)},\n]\n", "is not a trace of Outrider's"),
        ("trace", EVENT.format(tid=1, name='"é"').join("[]").encode("latin-1"), "is not a trace of Outrider's"),
        *(("trace", content, "is not a trace of Outrider's") for content in TRACES.values()),
        ("reference", b"\xe9", "it is not in UTF-8. Name a text file"),
    ],
)
def test_a_file_that_cannot_be_meant_is_named(
    kind: str, content: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run([*COMMANDS[kind], str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert str(path) in line
    assert "unexpected" not in line
    assert len(line) < 1000


@pytest.mark.parametrize("command", [["generate", "no-bundle", "hello"], ["demo"]], ids=" ".join)
def test_a_trace_that_cannot_be_written_is_said_before_anything_is_loaded(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--trace", str(tmp_path / "nowhere" / "out.json")]) == 2
    assert "out.json cannot be written: No such file or directory. Name another file." in capsys.readouterr().err


@pytest.mark.parametrize(("name", "content"), [
    ("setting.json", DEEP),
    ("setting.json", "[]"),
    ("setting.json", b"\xe9"),
    ("runs.jsonl", f"{DEEP}\n"),
    ("runs.jsonl", "{}\n"),
    ("runs.jsonl", '{"run": {"surprise": 1}}\n'),
    ("runs.jsonl", "3\n"),
])  # fmt: skip
def test_a_damaged_measurement_is_named(name: str, content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "setting.json").write_text(json.dumps({"a": 1}))
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match="cannot be used: .*Choose another folder"):
        RunFolder(tmp_path, {"a": 1})


def test_a_value_of_any_length_leaves_room_for_what_to_do() -> None:
    message = str(OptionError(f"{'[' * 40_000} is no number. Give one."))
    assert len(message) < 2100
    assert message.startswith("[[[")
    assert message.endswith("is no number. Give one.")
