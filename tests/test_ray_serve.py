"""The Ray Serve sample on a local cluster: a replica is killed under load."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

import outrider
from serving import wait_until

pytestmark = pytest.mark.slow
pytest.importorskip("ray.serve", reason='the sample needs Ray: pip install "ray[serve]"')
if sys.platform != "linux":
    pytest.skip("the replica to kill is found in /proc", allow_module_level=True)

SAMPLE = Path(__file__).parents[1] / "samples" / "ray_serve.py"
NUM_STREAMS, STREAM_TOKENS = 12, 3000
NUM_CHATS, NUM_TURNS, CHAT_TOKENS = 40, 4, 20


@pytest.fixture(scope="module")
def sample() -> dict[str, Any]:
    return runpy.run_path(str(SAMPLE))


def body_of(*messages: str, **fields: Any) -> bytes:
    roles = ["system", *["user", "assistant"] * len(messages)]
    return json.dumps(
        {"messages": [{"role": r, "content": m} for r, m in zip(roles, messages, strict=False)], **fields}
    ).encode()


def test_a_conversation_is_named_by_how_it_begins(sample: dict[str, Any]) -> None:
    name = sample["conversation_of"]
    assert name(body_of("s", "u")) == name(body_of("s", "u", "a", "u2")) != name(body_of("s", "u2"))
    assert name(body_of("s", "u", prompt_cache_key="k")) == name(body_of("t", "v", prompt_cache_key="k"))
    prompt = "x" * 300
    assert name(json.dumps({"prompt": prompt}).encode()) == name(json.dumps({"prompt": prompt + "y"}).encode())
    for wrong in (b"", b"[]", b"{", b'"a"', b'{"messages": 3}', b'{"messages": ["a"]}', b"\xff", b"[" * 100_000):
        assert name(wrong) == "" or wrong == b"{}"


@contextmanager
def cluster(bundle: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """The sample with two replicas: its address and process. Ray keeps to the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, SAMPLE, bundle, "--name", "tiny", "--port", port, "--cache-size", "0.1", "--cpus", "0.5"]
    ours = {"RAY_TMPDIR": str(folder), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | ours
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [*map(str, command)], stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        assert process.stdout
        try:
            line = process.stdout.readline()
            assert "with 2 replicas" in line, (folder / "log").read_text(encoding="utf-8")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield f"http://127.0.0.1:{port}", process.pid
            process.terminate()
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def replicas_of(driver: int) -> list[int]:
    """Process ids of the replicas that a driver's Ray has started."""
    parents: dict[int, int] = {}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:outrider:Server"):
                found.append(int(folder.name))
        except (OSError, UnicodeDecodeError):
            continue

    def is_ours(pid: int) -> bool:
        return pid == driver or (pid in parents and is_ours(parents[pid]))

    return [pid for pid in found if is_ours(pid)]


class Load:
    """Streams that last, and short chats of several turns beside them."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=100))
        self.begun = threading.Semaphore(0)  # streams

    def stream(self, number: int) -> tuple[str, str, str | None]:
        """The replica, the text, and how it ended."""
        text, end = "", None
        body = {"model": "tiny", "messages": [user(f"stream {number}")], "stream": True, "ignore_eos": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": STREAM_TOKENS}) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if line.startswith("data: {"):
                    event = json.loads(data)
                    if "error" in event:
                        end = event["error"]["code"]
                        continue
                    if not text:
                        self.begun.release()
                    text += event["choices"][0]["delta"].get("content") or ""
                elif line.startswith("data: "):
                    end = data
        return response.headers["x-replica"], text, end

    def chat(self, number: int) -> list[tuple[str, str, int]]:
        """The replica, the text and the cached tokens of each turn."""
        messages, turns = [user(f"chat {number}")], []
        for turn in range(NUM_TURNS):
            body = {"model": "tiny", "messages": messages, "max_tokens": CHAT_TOKENS, "ignore_eos": True}
            response = self._http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            text = answer["choices"][0]["message"]["content"]
            turns.append((response.headers["x-replica"], text, answer["timings"]["cache_n"]))
            messages += [{"role": "assistant", "content": text}, user(f"turn {turn}")]
        return turns


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def expected_chat(engine: outrider.Engine, number: int) -> list[str]:
    messages: list[Any] = [user(f"chat {number}")]
    for turn in range(NUM_TURNS):
        text = engine.generate(messages, max_new_tokens=CHAT_TOKENS, ignore_eos=True).text
        messages += [{"role": "assistant", "content": text}, user(f"turn {turn}")]
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_a_killed_replica_loses_what_it_streamed_and_nothing_else(tiny: Path) -> None:
    engine = outrider.load(tiny, cache_size=0.1)
    with (
        TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,  # Ray's sockets need a short path
        cluster(tiny, Path(folder)) as (url, driver),
        ThreadPoolExecutor(48) as pool,
    ):
        load = Load(url)
        streams = [pool.submit(load.stream, number) for number in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert load.begun.acquire(timeout=60)
        chats = [pool.submit(load.chat, number) for number in range(NUM_CHATS)]
        wait_until(lambda: sum(chat.done() for chat in chats) > 3)
        assert not all(stream.done() for stream in streams)
        victim, other = replicas_of(driver)
        os.kill(victim, signal.SIGKILL)
        turns = [chat.result(120) for chat in chats]
        ends = [stream.result(120) for stream in streams]
        wait_until(lambda: len({*replicas_of(driver)} - {victim, other}) == 1, 60)  # Ray starts another

    died = {replica for replica, _, end in ends if end == "replica_died"}
    first_ones = {replica for replica, _, _ in ends}
    assert (len(died), len(first_ones)) == (1, 2), "both replicas streamed"
    for number, chat in enumerate(turns):
        assert [text for _, text, _ in chat] == expected_chat(engine, number)
        for (replica, _, _), (following, _, cached) in pairwise(chat):
            if following == replica:
                assert cached > CHAT_TOKENS
            else:
                assert replica in died or following not in first_ones
    for number, (replica, text, end) in enumerate(ends):
        whole = engine.generate([user(f"stream {number}")], max_new_tokens=STREAM_TOKENS, ignore_eos=True).text
        assert (text == whole) if end == "[DONE]" else (replica in died and whole.startswith(text))
        assert end in ("[DONE]", "replica_died")
    moved = sum(len({replica for replica, _, _ in chat}) > 1 for chat in turns)
    print(f"{NUM_CHATS * NUM_TURNS} answers, {NUM_STREAMS} streams, {moved} conversations moved")
    print(Counter(end for _, _, end in ends), Counter(replica for chat in turns for replica, _, _ in chat))
