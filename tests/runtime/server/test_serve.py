"""`outrider serve`, as a process."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import outrider
from outrider.cli import run
from outrider.cli.serve import check_access, name_bundles
from outrider.server.run import listen, listen_all
from serving import MESSAGES, SERVE, served, wait_until

NUM_TOKENS = 2500  # which take longer than the half second until a stream would be cut


def client_of(printed: dict[str, Any], key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{printed['url']}/v1", api_key=key, max_retries=0, timeout=300)


def test_serve_answers_and_finishes_streams_when_it_is_ended(tiny: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    expected = outrider.load(tiny, cache_size=0.02).generate(MESSAGES, **options).text
    with served(f"one={tiny}", "--ignore-eos", "--grace", 600, OUTRIDER_API_KEY="secret") as (process, printed):
        assert printed["models"] == ["one"]
        assert httpx.get(f"{printed['url']}/v1/models").status_code == 401
        stream = client_of(printed, "secret").chat.completions.create(
            model="one", messages=MESSAGES, max_tokens=NUM_TOKENS, stream=True
        )
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        process.wait(300)
        assert process.stderr
        assert "Traceback" not in process.stderr.read()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("grace", "signals"), [(30, 2), (1, 1)])
def test_a_second_signal_or_the_grace_time_ends_answers_without_a_traceback(
    tiny: Path, grace: int, signals: int
) -> None:
    with served(f"one={tiny}", "--ignore-eos", "--grace", grace) as (process, printed):
        stream = client_of(printed).chat.completions.create(  # an answer that takes longer than the grace time
            model="one", messages=MESSAGES, max_tokens=3 * NUM_TOKENS, stream=True
        )
        next(stream)
        process.send_signal(signal.SIGINT)
        assert process.stderr
        while not (line := process.stderr.readline()).startswith(f"Waiting up to {grace} s for an answer."):
            assert line
        for _ in range(signals - 1):
            process.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="closed|peer|incomplete|Connection|reset"):
            list(stream)
        process.wait(300)
        lines = [
            line for line in process.stderr.read().splitlines() if not line.startswith("socket.send()")
        ]  # asyncio's
        assert lines[:2] == ["A client has disconnected.", "Unloaded one."]


SLOW_LOAD = """
import sys, time
from pathlib import Path
from outrider.cli import run
from outrider.system.progress import report
from outrider.server import models

load, go_on, args = models.Engine, Path(sys.argv[1]), sys.argv[2:]

def slow(*arguments):
    while not go_on.exists():
        report("It is measured.")
        time.sleep(0.02)
    return load(*arguments)

models.Engine = slow
sys.exit(run(["serve", *args]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_the_only_model_is_loaded_while_clients_are_told_so(tiny: Path, tmp_path: Path, ends: bool) -> None:
    go_on = tmp_path / "go on"
    port = free_port()
    command = [sys.executable, "-c", SLOW_LOAD, str(go_on), f"one={tiny}", "--port", str(port), "--cache-size", "0.02"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: health(port) == "Loading model: It is measured.")
        if ends:
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=300)
            assert not printed
            assert "Traceback" not in errors
        else:
            go_on.touch()
            assert process.stdout
            assert process.stdout.readline().startswith("Serving OpenAI's API at ")
            assert health(port) == "ok"
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def health(port: int) -> str:
    """What `/health` says; nothing while nobody listens."""
    try:
        found = httpx.get(f"http://127.0.0.1:{port}/health").json()
    except httpx.TransportError:
        return ""
    return str(found.get("status") or found["error"]["message"])


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_server(tiny: Path) -> None:
    command = [*SERVE, f"tiny={tiny}", "--port", "0", "--cache-size", "0.0000001"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cache_size" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_localhost_is_ipv4_and_ipv6() -> None:
    found = listen_all("localhost", 0)
    try:
        names = [each.getsockname() for each in found]
        assert [name[0] for name in names] == ["127.0.0.1", "::1"][: len(names)]
        assert len({name[1] for name in names}) == 1
        for name in names:
            socket.create_connection(name[:2]).close()
        with pytest.raises(outrider.OptionError, match="is not available"):
            listen_all("localhost", names[0][1])
    finally:
        for each in found:
            each.close()


def test_parts_of_a_response_are_sent_at_once() -> None:
    """Else each response takes 40 ms more, on any machine."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_wrong_use_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in (
            (["--host", "::"], "is open to other machines, and there is no API key"),
            ([f"tiny={tiny}"], "Two models are named 'tiny'"),
            (["--port", port, "more=no-such-model"], f"{port} is not available"),
            (["--host", "[::1]", "--port", "1", "--cache-size", "-1"], "cache_size"),
            (["--cache-size", "-1"], "cache_size"),
        ):
            assert run(["serve", f"tiny={tiny}", *arguments]) == 2
            (printed,) = capsys.readouterr().err.splitlines()
            assert printed.startswith("outrider: ")
            assert says in printed
    assert run(["serve", str(tiny / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "says"), [
    (["--max-body", "nan"], "'--max-body': nan is not a number"),
    (["--max-body", "inf"], "'--max-body': inf is not in the range"),
    (["--timeout", "nan"], "'--timeout': nan is not a number"),
    (["--timeout", "inf"], "'--timeout': inf is not a number"),
    (["--idle-minutes", "nan"], "'--idle-minutes': nan is not a number"),
    (["--num-threads", "100000000"], "num_threads=100000000 is not an integer from 0 to 1024"),
    (["--drafter", "sufix"], "has no drafter 'sufix'. Did you mean 'suffix'?"),
    (["--drafter", "draft"], "has no drafter 'draft'. Known: auto, ngram, none, suffix."),
])  # fmt: skip
def test_numbers_and_names_that_no_server_can_use(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    """They are refused before anything is loaded."""
    monkeypatch.setattr("outrider.server.models.Model.load", lambda _: pytest.fail("a model was loaded"))
    monkeypatch.setattr("outrider.server.run.run", lambda *_, **__: pytest.fail("the server has begun"))
    assert run(["serve", f"one={tiny}", f"two={tiny}", *arguments]) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert says in printed


def test_access_has_to_be_decided() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        check_access(host, None, no_api_key=False)
    for host in ("0.0.0.0", "::", "192.168.1.4", "my-machine", ""):  # noqa: S104
        with pytest.raises(outrider.OptionError, match="no API key"):
            check_access(host, None, no_api_key=False)
        check_access(host, "key", no_api_key=False)
        check_access(host, None, no_api_key=True)


def test_bundles_are_named_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert name_bundles(("x/qwen", "small=y/z", "a=b")) == {"qwen": "x/qwen", "small": "y/z", "a=b": "a=b"}
    for wrong in ("=x", "x="):
        with pytest.raises(outrider.OptionError, match="neither a model nor NAME=MODEL"):
            name_bundles((wrong,))


@pytest.mark.slow
def test_the_example_is_one_that_works(tiny: Path) -> None:
    command = [*SERVE, f"tiny={tiny}", "--port", "0", "--cache-size", "0.02", "--max-new-tokens", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert "Serving OpenAI's API at http://127.0.0.1:" in lines[0]
        done = subprocess.run(lines[1], shell=True, capture_output=True, text=True, check=True)  # noqa: S602
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    finally:
        timer.cancel()
        process.terminate()
        process.communicate()
