"""`outrider serve`, as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

import outrider
from outrider.cli import run
from outrider.cli.serve import check_access, name_bundles
from outrider.server.run import listen
from serving import MESSAGES, SERVE, served

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 7000  # which take longer than the half second until a stream would be cut


def client_of(printed: dict[str, Any], key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{printed['url']}/v1", api_key=key, max_retries=0, timeout=60)


def test_serve_answers_and_finishes_streams_when_it_is_ended(tiny: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    expected = outrider.load(tiny, cache_size=0.02).generate(MESSAGES, **options).text
    with served(f"one={tiny}", "--ignore-eos", OUTRIDER_API_KEY="secret") as (process, printed):
        assert printed["models"] == ["one"]
        assert httpx.get(f"{printed['url']}/v1/models").status_code == 401
        stream = client_of(printed, "secret").chat.completions.create(
            model="one", messages=MESSAGES, max_tokens=NUM_TOKENS, stream=True
        )
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        process.wait(30)
        assert process.stderr
        assert "Traceback" not in process.stderr.read()


def test_parts_of_a_response_are_sent_at_once() -> None:
    """Else each response takes 40 ms more, on any machine."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_that_was_killed_starts_again(tiny: Path) -> None:
    texts = []
    for _ in range(2):
        with served(f"tiny={tiny}") as (process, printed):
            client = client_of(printed)
            texts.append(client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content)
            extra = {"ignore_eos": True}
            stream = client.completions.create(
                model="tiny", prompt="Hi", max_tokens=5000, temperature=1, stream=True, extra_body=extra
            )
            next(stream)
            process.kill()
            with pytest.raises(Exception, match="closed|peer|incomplete|Connection|reset"):
                list(stream)
    assert texts[0] == texts[1]


def test_wrong_use_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in (
            (["--host", "::"], "lets other machines in, and there is no API key"),
            ([f"tiny={tiny}"], "Two bundles are named 'tiny'"),
            (["--port", port], "cannot be listened at"),
            (["--cache-size", "-1"], "cache_size"),
        ):
            assert run(["serve", f"tiny={tiny}", *arguments]) == 2
            (printed,) = capsys.readouterr().err.splitlines()
            assert printed.startswith("outrider: ")
            assert says in printed
    assert run(["serve", str(tiny / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


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
        with pytest.raises(outrider.OptionError, match="neither a bundle nor NAME=BUNDLE"):
            name_bundles((wrong,))


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
