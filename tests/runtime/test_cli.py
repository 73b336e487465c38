"""The command line: its output, and errors in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli import COMMANDS, run
from outrider.cli.tune import Work
from outrider.models.cost.table import CallCost
from outrider.system.plugins import plugins

OUTRIDER = [sys.executable, "-c", "from outrider.cli import main; main()"]
PROMPT = "Correct the spelling: Teh quick brown fox jmups over the lazy dog."


def assert_only_loads(printed: str, model: object) -> None:
    """Nothing is said but which model is loaded and, the first time on this machine, what is measured of it."""
    lines = printed.splitlines()
    assert {line for line in lines if not line.startswith("The main model ")} <= {f"Loading {model}."}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run([*map(str, arguments), "--json"]) == 0
    printed = capsys.readouterr()
    assert_only_loads(printed.err, arguments[1])
    result: dict[str, Any] = json.loads(printed.out)
    return result


def test_generate_prints_the_answer(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(tiny), PROMPT, "--max-new-tokens", "30"]) == 0
    printed = capsys.readouterr()
    result = run_json(capsys, "generate", tiny, PROMPT, "--max-new-tokens", 30)
    assert printed.out == result["text"] + "\n"
    assert_only_loads(printed.err, tiny)
    assert result["finish_reason"] in ("stop", "length")
    assert result["stats"]["num_generated_tokens"] == len(result["token_ids"])


def test_compare_shows_the_same_text_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(model), PROMPT, "--max-new-tokens", "30", "--compare"]) == 0
    printed = capsys.readouterr().out
    result = run_json(capsys, "generate", model, PROMPT, "--max-new-tokens", 30, "--compare")
    assert result["compare"]["identical"] is True
    assert result["compare"]["plain"]["token_ids"] == result["token_ids"]
    assert printed.count(result["text"]) == 1
    for label in ("tokens per second", "acceptance rate", "tokens per round", "drafting", "target passes", "The same"):
        assert label in printed


def test_options_reach_the_request(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", tiny, PROMPT, "--max-new-tokens", 20, "--temperature", 0.9, "--top-p", 0.9]
    first = run_json(capsys, *arguments, "--seed", 3)
    assert first["seed"] == 3
    assert run_json(capsys, *arguments, "--seed", 3)["token_ids"] == first["token_ids"]
    assert run_json(capsys, *arguments, "--seed", 4)["token_ids"] != first["token_ids"]
    plain = run_json(capsys, "generate", tiny, PROMPT, "--max-new-tokens", 20, "--drafter", "none")
    assert plain["stats"]["num_drafts"] == 0
    stop = plain["text"][5:9]
    stopped = run_json(capsys, "generate", tiny, PROMPT, "--max-new-tokens", 20, "--stop", stop)
    assert stopped["text"] == plain["text"][: plain["text"].find(stop)]


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("outrider, version ")


@pytest.mark.slow
def test_the_prompt_can_come_from_standard_input(tiny: Path) -> None:
    done = subprocess.run(
        [*OUTRIDER, "generate", str(tiny), "-", "--max-new-tokens", "5", "--json"],
        input=PROMPT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["stats"]["num_generated_tokens"] == 5


def test_a_config_is_read_and_options_win(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[generation]\nmax_new_tokens = 7\ndrafter = "none"\n')
    arguments = ["generate", tiny, PROMPT, "--config", path]
    result = run_json(capsys, *arguments)
    assert (len(result["token_ids"]), result["stats"]["num_drafts"]) == (7, 0)
    assert len(run_json(capsys, *arguments, "--max-new-tokens", 4)["token_ids"]) == 4


def test_references_that_cannot_be_read_are_named(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "reference.txt"
    path.write_text("What is no answer store.", encoding="utf-8")
    arguments = ["generate", tiny, "Name the planets.", "--drafter", "suffix"]
    fails(capsys, 2, "Reference .*nowhere.txt cannot be read", *arguments, "--reference", tmp_path / "nowhere.txt")
    fails(capsys, 2, "reference.txt' is no answer store", *arguments, "--answer-store", path)


@pytest.mark.slow
def test_tune_prints_a_row_for_every_length(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "tune", tiny, "--max-new-tokens", 8)
    assert [row["num_assistant_tokens"] for row in result["rows"]] == [0, "auto", *range(1, 9)]
    assert result["drafter"] == "suffix"
    assert len(result["costs"]["main"]["near"]) == len(result["costs"]["main"]["rows"])
    assert all(row["identical"] == row["num_prompts"] == 6 for row in result["rows"])
    assert result["rows"][0]["speed_up"] == 1


@pytest.mark.slow
def test_tune_searches_on_request(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "tune", tiny, "--search", "--max-new-tokens", 8)
    for choice in result["choices"].values():
        assert choice["setting"] in [trial["setting"] for trial in choice["trials"]]


def test_tune_measures_what_fits_in_its_time() -> None:
    def engine(seconds: float) -> Any:
        return SimpleNamespace(costs={"main": CallCost((1, 4), (seconds, 2 * seconds), (seconds, 2 * seconds))})

    whole = Work(6, 64, tuple(range(1, 9)))
    fast, slow, slowest = (
        whole.within(120, engine(each), keep_prompts=False, keep_length=None) for each in (0.01, 0.1, 3.0)
    )
    assert fast == whole
    assert slow.seconds(engine(0.1)) <= 120 < whole.seconds(engine(0.1))
    assert slow.num_prompts >= 2
    assert slow.seconds(engine(0.1)) > 60
    assert slowest == Work(2, 24, (2, 5))
    kept = whole.within(120, engine(0.1), keep_prompts=True, keep_length=64)
    assert (kept.num_prompts, kept.length, kept.lengths) == (6, 64, (2, 5))


@pytest.mark.slow
def test_bench_compares_with_openvino_genai(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is a fox?", "category": "qa"}\n\n{"turns": ["Count to five."], "id": "c"}\n')
    arguments = ["bench", str(tiny), "--prompts", str(prompts), "--modes", "plain,ngram:2,genai,genai-ngram:2"]
    result = run_json(capsys, *arguments, "--max-new-tokens", 6, "--repeats", 2)
    assert {row["mode"] for row in result["summary"]} == {"plain", "ngram:2", "genai", "genai-ngram:2"}
    assert len(result["runs"]) == 2 * 4 * 2
    ours = [row for row in result["summary"] if row["mode"] == "ngram:2" and row["category"] == "all"]
    assert ours[0]["identical"] == 2
    assert run([*arguments[:4], "--max-new-tokens", "4"]) == 0
    assert "accepted" in capsys.readouterr().out


def test_text_with_markup_is_printed_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, 1, r"There is no folder z\[/bold\]", "inspect", "z[/bold]")
    from outrider.cli.console import out

    out.print("a[i] [/x] :smile:")
    assert capsys.readouterr().out == "a[i] [/x] :smile:\n"


@pytest.mark.slow
def test_output_is_utf8_wherever_it_goes(tiny: Path) -> None:
    done = subprocess.run(
        [*OUTRIDER, "generate", str(tiny), "Repeat: 日本語 🎉", "--max-new-tokens", "12", "--json"],
        capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode("utf-8"))["text"]


def test_without_a_command_there_is_help_at_once() -> None:
    code = "import sys; from outrider.cli import run; run([]); sys.exit(bool({'numpy', 'openvino'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Commands:" in done.stdout
    assert done.returncode == 0, "a command's module imports NumPy or OpenVINO before it is used"


def test_help_is_there_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in sorted({*COMMANDS, *plugins("commands")}):
        assert re.search(rf"^  {command} ", listed, re.MULTILINE)
        assert run([command, "--help"]) == 0


def fails(capsys: pytest.CaptureFixture[str], exit_code: int, message: str, *arguments: object) -> None:
    assert run(list(map(str, arguments))) == exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    *loading, error = printed.err.splitlines()
    assert all(line.startswith("Loading ") for line in loading), printed.err
    assert re.search(message, error), printed.err


@pytest.mark.parametrize(("exit_code", "message", "arguments"), [
    (2, "no command 'genrate'. Did you mean 'generate'", ["genrate"]),
    (2, "No such option.*--temprature.*--temperature", ["generate", "b", "p", "--temprature", "1"]),
    (2, "Missing argument 'PROMPT'", ["generate", "b"]),
    (2, "'hot' is not a valid float", ["generate", "b", "p", "--temperature", "hot"]),
    (2, "max_num_batched_tokens=1 is not", ["generate", "b", "p", "--max-num-batched-tokens", "1"]),
    (2, "'5' is not ID=VALUE", ["generate", "b", "p", "--logit-bias", "5"]),
    (2, "'5=2' is the second value for 5", ["bench", "b", "--logit-bias", "5=1", "--logit-bias", "5=2"]),
    (2, "--logprobs needs --json", ["generate", "b", "p", "--logprobs", "2"]),
    (2, "--system needs the chat template", ["generate", "b", "p", "--system", "s", "--no-chat-template"]),
    (2, "tune varies --num-assistant-tokens", ["tune", "b", "--num-assistant-tokens", "3"]),
    (1, "There is no folder b", ["generate", "b", "p"]),
])  # fmt: skip
def test_bad_usage(
    capsys: pytest.CaptureFixture[str], exit_code: int, message: str, arguments: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    fails(capsys, exit_code, message, *arguments)


def test_bad_requests(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ("generate", tiny)
    fails(capsys, 1, "The prompt is empty", *generate, "  ")
    fails(capsys, 1, "exceed the model's context of 8,192 tokens", *generate, "word " * 9000)
    room = ("--cache-size", 0.0005)  # for some hundred tokens
    fails(capsys, 1, "holds .* tokens; .* Raise cache_size to", *generate, "word " * 900, *room)
    fails(capsys, 2, "no device 'XPU' here. Found: CPU", *generate, "hello", "--main-device", "XPU")
    unknown = "CPU cannot compile main: it has no property 'PREF_COUNT'. Did you mean 'PERF_COUNT'?"
    fails(capsys, 1, re.escape(unknown) + "$", *generate, "hello", "--property", "PREF_COUNT=1")
    fails(capsys, 2, "no drafter 'draft' here", *generate, "hello", "--drafter", "draft")
    fails(capsys, 2, "no mode 'warp'", "bench", tiny, "--modes", "plain,warp")
    fails(capsys, 2, "needs a draft model", "bench", tiny, "--modes", "draft:3")
    genai = ("bench", tiny, "--modes", "genai", "--json", "--no-repeat-ngram-size", 2)
    fails(capsys, 2, "openvino-genai has no no_repeat_ngram_size here, so mode 'genai' cannot be compared", *genai)


@pytest.mark.needs("POSIX")
def test_ctrl_c_is_one_line(tiny: Path) -> None:
    process = subprocess.Popen(
        [*OUTRIDER, "generate", str(tiny), PROMPT, "--ignore-eos", "--max-new-tokens", "4000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(5)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors == f"Loading {tiny}.\noutrider: Cancelled.\n"


@pytest.mark.slow
@pytest.mark.needs("POSIX")
def test_a_reader_that_leaves_is_no_error(tiny: Path) -> None:
    process = subprocess.Popen(
        [*OUTRIDER, "generate", str(tiny), PROMPT, "--ignore-eos", "--max-new-tokens", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert process.stderr.read() == f"Loading {tiny}.\n"


SENDS_NOTHING = """
import sys
from outrider.cli import main
try:
    main(["--version"])
except SystemExit:
    import openvino
    sys.exit(sys.modules["openvino_telemetry"] is not None)
"""


def test_the_command_sends_no_usage_statistics() -> None:
    subprocess.run([sys.executable, "-c", SENDS_NOTHING], check=True, timeout=300)


def test_the_unexpected_is_one_line_too(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("outrider.engine.engine.load", broken)
    fails(capsys, 1, r"ZeroDivisionError: two lines \(unexpected: set OUTRIDER_DEBUG=1", "generate", tiny, "hello")
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(["generate", str(tiny), "hello"])
