"""Serves a bundle to clients that come, vanish, cancel and send nonsense, and looks for what they leave behind.

    python bench/scripts/soak.py BUNDLE [MINUTES] [CLIENTS]

`outrider serve` runs as a process with the bundle under two names, and unloads what is not used for two seconds: the
second model comes and goes while the first one answers, and between the parts both do. Of the texts, greedy and sampled
from a seed, all are known beforehand. After each part the clients rest, and a row is printed: what happened, the
times of those who read streams, and what the server holds at rest. Ends with status 1 if a text was wrong, the server
failed, or what it holds has grown. Thirty minutes is a full run. Memory, threads and files are those of Linux.
"""

import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from collections.abc import Callable, Coroutine

import outrider
from serving import served, wait_until

# Bounds of what the server holds at rest, with all models unloaded, as compared with the rest after the parts that warm
# it up. No model and no cache of one is part of it.
MOST_MEMORY = 1.2  # times as much: allocators do not return all that is free
MOST_THREADS, MOST_FILES = 2, 2  # more
NUM_PARTS, NUM_WARM = 10, 3
PROMPTS = ("The quick brown fox", "def quicksort(items):", "It's 2024, isn't it?", "abc abc abc abc abc abc")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"regex": "[a-z ]{20,60}"},
)
LENGTH = 60
SERVE = ("--idle-minutes", "0.033", "--max-running", "16", "--max-waiting", "12", "--max-body", "0.2",
         "--cache-size", "0.2")  # fmt: skip
# OpenVINO keeps kernels for thousands of shapes, and its library oneDNN another 1,024 for the whole process, which
# takes hours to fill. Here for a few: other growth shows. Settings are measured for these properties, too, so the texts
# are made with them.
KERNELS = {"CPU_RUNTIME_CACHE_CAPACITY": "16"}
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


@dataclass(frozen=True)
class Asked:
    """A request whose text is known."""

    path: str
    body: dict[str, Any]
    text: str


@dataclass
class Seen:
    """What the clients of one part have seen. first, between: seconds to a stream's first piece, and between pieces."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rest:
    """What the server holds when nobody asks. megabytes, threads, files: None where that is not known."""

    megabytes: float | None
    threads: int | None
    files: int | None

    def growth_since(self, first: "Rest") -> list[str]:
        """What has grown beyond its bound."""
        found = []
        for name, most in (("megabytes", MOST_MEMORY), ("threads", MOST_THREADS), ("files", MOST_FILES)):
            before, now = getattr(first, name), getattr(self, name)
            bound = before and (before * most if name == "megabytes" else before + most)
            if before is not None and now > bound:
                found.append(f"{name}: {before:.0f} once it was warm, {now:.0f} at the end, more than {bound:.0f}")
        return found


def known_texts(bundle: Path) -> list[Asked]:
    """Requests, and the texts that the engine answers them with in this process."""
    found = []
    with outrider.load(bundle, cache_size=0.2, properties=KERNELS) as engine:
        for prompt in PROMPTS:
            for options in OPTIONS:
                own = {"max_new_tokens": LENGTH, "ignore_eos": "regex" not in options} | options
                asked = {"max_tokens": LENGTH, "ignore_eos": "regex" not in options} | options
                text = engine.generate(prompt, chat_template=False, **own).text
                found.append(Asked("/v1/completions", asked | {"prompt": prompt}, text))
                messages = [{"role": "user", "content": prompt}]
                found.append(
                    Asked("/v1/chat/completions", asked | {"messages": messages}, engine.generate(messages, **own).text)
                )
    return found


def nonsense(rng: random.Random) -> tuple[str, bytes]:
    """An address, and a body that is none."""
    good = {"model": "one", "prompt": "Hi", "max_tokens": 3}
    bad: list[Any] = [
        good | {"max_tokens": -3}, good | {"temperature": "hot"}, good | {"surprise": 1}, good | {"model": "none"},
        good | {"adapter": "none such"}, good | {"prompt": "word " * 20_000}, good | {"prompt": [10**9]},
        good | {"regex": "("}, good | {"grammar": "start"}, good | {"n": 500}, good | {"stop": [1]}, [], 5, None,
    ]  # fmt: skip
    others = [rng.randbytes(200), b"[" * 50_000, b'{"model": ' + b'{"a":' * 20_000, b" " * 300_000, b"\xff\xfe"]
    body = json.dumps(rng.choice(bad)).encode() if rng.random() < 0.7 else rng.choice(others)
    return rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses"]), body


class Client:
    """One of many, who does this and that."""

    def __init__(self, http: httpx.AsyncClient, port: int, known: list[Asked], rng: random.Random, seen: Seen) -> None:
        self.http, self.port, self.known, self.rng, self.seen = http, port, known, rng, seen

    async def act(self) -> None:
        """Do one thing."""
        ways: list[tuple[Callable[[], Coroutine[Any, Any, str]], int]] = [
            (self.read_stream, 40), (self.read_whole, 15), (self.leave_stream, 20), (self.cancel, 10),
            (self.send_nonsense, 10), (self.send_bytes, 3), (self.look, 2),
        ]  # fmt: skip
        (way,) = self.rng.choices([way for way, _ in ways], [weight for _, weight in ways])
        try:
            kind = await way()
        except httpx.HTTPError as error:
            kind = "no answer"
            self.seen.faults.append(f"{way.__name__}: {type(error).__name__} {error}".strip())
        self.seen.counts[kind] += 1
        if kind == "refused":
            await asyncio.sleep(self.rng.random())

    def body(self, asked: Asked, **fields: Any) -> dict[str, Any]:
        model = "two" if self.rng.random() < 0.01 else "one"
        return asked.body | {"model": model, "drafter": self.rng.choice(["auto", "suffix", "ngram", "none"])} | fields

    def judge(self, status: int, text: str, asked: Asked) -> str:
        """What kind of end an answer is."""
        if status == 429:
            return "refused"
        if status != 200 or text != asked.text:
            self.seen.faults.append(f"{status}: {text[:80]!r} for {asked.body}, {asked.text[:80]!r} is right")
            return "wrong"
        return "right"

    async def read_whole(self) -> str:
        asked = self.rng.choice(self.known)
        answer = await self.http.post(asked.path, json=self.body(asked))
        text = answer.text
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
        return self.judge(answer.status_code, text, asked)

    async def read_stream(self, patience: int = 10**9) -> str:
        asked = self.rng.choice(self.known)
        began, last, text = time.perf_counter(), 0.0, ""
        async with self.http.stream("POST", asked.path, json=self.body(asked, stream=True)) as answer:
            if answer.status_code != 200:
                return self.judge(answer.status_code, (await answer.aread()).decode(), asked)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return self.judge(200, text, asked)
                if not line.startswith("data: "):
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                now = time.perf_counter()
                if last:
                    self.seen.between.append(now - last)
                else:
                    self.seen.first.append(now - began)
                last, patience = now, patience - 1
                if patience < 0:
                    if not asked.text.startswith(text):
                        self.judge(200, text, asked)
                    return "left"
        return self.judge(200, text, asked)  # without its end

    async def leave_stream(self) -> str:
        return await self.read_stream(self.rng.choice([0, 1, 5, 20]))

    async def cancel(self) -> str:
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.read_whole(), self.rng.expovariate(10))
        return "left"

    async def send_nonsense(self) -> str:
        path, body = nonsense(self.rng)
        answer = await self.http.post(path, content=body, headers={"Content-Type": "application/json"})
        if not 400 <= answer.status_code < 500:
            self.seen.faults.append(f"{answer.status_code} for {body[:80]!r}")
        return "refused"

    async def send_bytes(self) -> str:
        """Begin a request, or send no HTTP at all, and vanish."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        half = head + b'Content-Length: 1000\r\n\r\n{"model": "one"'
        writer.write(self.rng.choice([half, head, half[: self.rng.randrange(len(half))], self.rng.randbytes(500)]))
        with suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(self.rng.random())
        writer.close()
        return "left"

    async def look(self) -> str:
        answer = await self.http.get(self.rng.choice(["/metrics", "/v1/models", "/health", "/openapi.json"]))
        if answer.status_code not in (200, 503):  # the first model may be on its way
            self.seen.faults.append(f"{answer.status_code} for {answer.url}")
        return "looked"


async def crowd(url: str, known: list[Asked], num_clients: int, seconds: float, seed: int) -> Seen:
    """What this many clients see within this time."""
    seen, end = Seen(), time.monotonic() + seconds

    async def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            client = Client(http, int(url.rsplit(":", 1)[1]), known, rng, seen)
            while time.monotonic() < end and len(seen.faults) < 20:
                await client.act()

    await asyncio.gather(*(run(number) for number in range(num_clients)))
    return seen


def metric(url: str, name: str) -> float | None:
    """The largest of a metric's values over the models."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return max(map(float, found)) if found else None


def is_zero(url: str, name: str) -> bool:
    """Whether a metric is 0 for all models."""
    return metric(url, name) == 0


def rest(url: str, pid: int) -> Rest:
    """Wait until nothing runs or holds a part of the cache, then until the models are unloaded."""
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        wait_until(partial(is_zero, url, f"vllm:{name}"), 60)
    wait_until(lambda: not any(model["loaded"] for model in httpx.get(f"{url}/v1/models").json()["data"]), 60)
    tasks = Path(f"/proc/{pid}/task")
    num_bytes, files = (metric(url, f"process_{name}") for name in ("resident_memory_bytes", "open_fds"))
    return Rest(
        num_bytes and num_bytes / 1e6,
        len([*tasks.iterdir()]) if tasks.exists() else None,
        None if files is None else int(files),
    )


def row(minutes: float, seen: Seen, at_rest: Rest) -> str:
    """A line of the table."""
    counts = (seen.counts[kind] for kind in ("right", "wrong", "left", "refused"))
    times = (
        " / ".join(f"{1e3 * value:.0f}" for value in (statistics.median(each), statistics.quantiles(each, n=100)[98]))
        if len(each) > 1  # else nothing was answered, and the faults say why
        else "–"
        for each in (seen.first, seen.between)
    )
    held = (f"{at_rest.megabytes or 0:.0f}", at_rest.threads, at_rest.files)
    return " | ".join(["", f"{minutes:.1f}", *map(str, (*counts, *times, *held)), ""]).strip()


def soak(bundle: Path, minutes: float, num_clients: int) -> list[str]:
    """Run it, and print its table. Returns what was wrong."""
    known, faults, rests = known_texts(bundle), list[str](), list[Rest]()
    properties = (text for name, value in KERNELS.items() for text in ("--property", f"{name}={value}"))
    served_as = (f"one={bundle}", f"two={bundle}", *SERVE, *properties)
    with served(*served_as, **FEW_KERNELS) as (process, printed):
        url = printed["url"]
        print("| minute | texts right | wrong | left | refused | first token, ms, p50 / p99 | between, ms, p50 / p99 "
              "| memory, MB | threads | files |\n" + "|---" * 10 + "|", flush=True)  # fmt: skip
        for part in range(NUM_PARTS):
            seen = asyncio.run(crowd(url, known, num_clients, minutes * 60 / NUM_PARTS, part))
            rests.append(rest(url, process.pid))
            print(row((part + 1) * minutes / NUM_PARTS, seen, rests[-1]), flush=True)
            faults += seen.faults
            if faults:
                break
    return faults + rests[-1].growth_since(rests[min(NUM_WARM, len(rests)) - 1])


def main() -> None:
    """Run it as the command line says."""
    bundle, *numbers = sys.argv[1:]
    faults = soak(Path(bundle), float(numbers[0]) if numbers else 30, int(numbers[1]) if numbers[1:] else 32)
    print("\n".join(faults) or "Nothing was wrong, and nothing has grown.")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
