"""Many streams that are closed at random moments; then the same answers as before, and nothing that is left.

OUTRIDER_CANCELS says how many, OUTRIDER_CANCELS_BUNDLE on which bundle. By default few, on the tiny one.
"""

import asyncio
import os
import random
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.server import Settings
from serving import CONFIG, Live, serving, wait_until

NUM_CANCELS = int(os.environ.get("OUTRIDER_CANCELS", "80"))
BUNDLE = os.environ.get("OUTRIDER_CANCELS_BUNDLE")
NUM_CLIENTS = 8
SECONDS = 0.05 if BUNDLE is None else 0.3  # that a client waits on average, if it does not count events
PROMPTS = ("The quick brown fox", "def quicksort(items):", "abc abc abc abc abc abc")
WORDS = ("the", "sky", "is", "blue", "because", "def", "return", "abc", "2024", "and", "light", "scattered")
Answers = dict[tuple[str, int | None, str], str]


def body_of(rng: random.Random, drafters: list[str]) -> tuple[str, dict[str, Any]]:
    """A stream to ask for: an address and a body. Some prompts are long, and all are new to the cache."""
    text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 50, 300]))) + f" {rng.random()}"
    body = {"model": "tiny", "stream": True, "drafter": rng.choice(drafters), "ignore_eos": True}
    if rng.random() < 0.5:
        body |= {"temperature": 1, "seed": rng.randrange(1000)}
    kind = rng.choice(["completions", "chat/completions", "responses"])
    if kind == "responses":
        return kind, body | {"input": text, "max_output_tokens": 100}
    body |= {"max_tokens": 100, "n": rng.choice([1, 1, 3])}
    return kind, body | (
        {"prompt": text} if kind == "completions" else {"messages": [{"role": "user", "content": text}]}
    )


async def vanish(client: httpx.AsyncClient, rng: random.Random, drafters: list[str]) -> str:
    """Ask for a stream, and leave at some moment. Returns when that was."""
    kind, body = body_of(rng, drafters)
    num_events = 0

    async def read(most: int) -> str:
        nonlocal num_events
        async with client.stream("POST", f"/v1/{kind}", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                num_events += line.startswith("data: ")
                if num_events > most:
                    return "answering"
        return "ended"

    if rng.random() < 0.4:
        return await read(rng.randrange(30))
    with suppress(TimeoutError):
        return await asyncio.wait_for(read(10_000), rng.expovariate(1 / SECONDS))
    return "answering" if num_events else "before"


async def crowd(url: str, drafters: list[str]) -> Counter[str]:
    """What the clients saw of their answers, until enough have left."""
    tally, limits = Counter[str](), httpx.Limits(max_connections=None)

    async def client(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as connection:
            while tally["answering"] + tally["before"] < NUM_CANCELS:
                tally[await vanish(connection, rng, drafters)] += 1
                if tally.total() % 100 == 0:
                    print(dict(tally), flush=True)

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return tally


def answers(live: Live, drafters: list[str]) -> Answers:
    """The texts of a fixed set of requests."""
    texts = Answers()
    for prompt in PROMPTS:
        for seed in (None, 1, 2):
            sampled = {} if seed is None else {"temperature": 1, "seed": seed}
            for drafter in drafters:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "drafter": drafter, "ignore_eos": True}
                answer = httpx.post(f"{live.url}/v1/completions", json=body | sampled, timeout=600)
                texts[prompt, seed, drafter] = answer.json()["choices"][0]["text"]
    return texts


def num_used_tokens(live: Live) -> dict[str, int]:
    return {role: use.num_used_tokens for role, use in live.engine().cache.items()}


@pytest.mark.slow
def test_cancels_at_random_moments_leave_nothing_behind(tiny: Path) -> None:
    folder = tiny if BUNDLE is None else Path(BUNDLE)
    config = CONFIG if BUNDLE is None else CONFIG.replace(cache_size=0.5)
    with serving({"tiny": folder}, Settings(max_running=16, max_waiting=64), config) as live:
        live.service.models.find("tiny").load()
        drafters = ["none", "auto", *live.engine().drafters]
        before = answers(live, drafters)
        tally = asyncio.run(crowd(live.url, drafters))
        wait_until(lambda: live.is_idle and not any(num_used_tokens(live).values()), 60)
        print(f"{NUM_CANCELS:,} cancels: {dict(tally)}, drafters {', '.join(drafters)}")
        assert tally["before"] > 0 < tally["answering"]
        assert answers(live, drafters) == before
        for prompt in PROMPTS:  # whoever drafts
            for seed in (None, 1, 2):
                assert len({before[prompt, seed, drafter] for drafter in drafters}) == 1
        wait_until(lambda: not any(num_used_tokens(live).values()))
        metrics = httpx.get(f"{live.url}/metrics").text
        counts = re.findall(r"^vllm:num_requests_(running|waiting){.*} (\S+)$", metrics, re.MULTILINE)
        assert counts == [("running", "0.0"), ("waiting", "0.0")]
