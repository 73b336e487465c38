"""Many clients for a while, many of which vanish. OUTRIDER_LOAD_MINUTES says how long; a tenth of one by default."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import outrider
from serving import served, wait_until

if TYPE_CHECKING:
    from pathlib import Path

MINUTES = float(os.environ.get("OUTRIDER_LOAD_MINUTES", "0.1"))
GROWTH = 1.05 if MINUTES >= 1 else 1.2  # of memory; where the load is short, the caches of kernels still fill
NUM_STREAMS = 32
PROMPTS = ("The quick brown fox", "def quicksort(items):", "It's 2024, isn't it?", "abc abc abc abc abc abc")
OPTIONS: dict[str, Any] = {"max_new_tokens": 120, "temperature": 1.0, "ignore_eos": True}
Tally = Counter[str]


async def stream(client: httpx.AsyncClient, rng: random.Random, expected: dict[tuple[str, int], str]) -> str:
    """Ask for one answer, and maybe leave before its end. Returns what happened."""
    prompt, seed = rng.choice(list(expected))
    body = {"model": "tiny", "prompt": prompt, "seed": seed, "stream": True, "max_tokens": 120, "temperature": 1}
    body |= {"ignore_eos": True, "drafter": rng.choice(["auto", "suffix", "ngram", "none"])}
    patience = rng.choice([0, 1, 5, 20, 10_000])
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                assert text == expected[prompt, seed]
                return "whole"
            if not line.startswith("data: "):  # an end of an event, or a comment that keeps the connection
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            patience -= 1
            if patience < 0:
                assert expected[prompt, seed].startswith(text)
                return "left"
    raise AssertionError("the stream ended too soon")


async def crowd(url: str, expected: dict[tuple[str, int], str], seconds: float) -> list[Tally]:
    """What happened to each of the clients."""
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)

    async def client(number: int) -> Tally:
        rng, tally = random.Random(number), Tally()
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as connection:
            while time.monotonic() < end:
                tally[await stream(connection, rng, expected)] += 1
        return tally

    return await asyncio.gather(*(client(number) for number in range(NUM_STREAMS)))


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found
    return float(found[1])


def warm_up(url: str, expected: dict[tuple[str, int], str]) -> float:
    """Load the server until its memory stays within 1 %, or for some rounds. Returns its bytes."""
    now = 0.0
    for _ in range(3 if MINUTES < 1 else 15):
        asyncio.run(crowd(url, expected, min(MINUTES * 60, 20)))
        before, now = now, metric(url, "process_resident_memory_bytes")
        if now <= before * 1.01:
            break
    return now


@pytest.mark.slow
def test_vanishing_clients_leave_nothing_behind(tiny: Path) -> None:
    engine = outrider.load(tiny, cache_size=0.02)
    expected = {
        (prompt, seed): engine.generate(prompt, chat_template=False, seed=seed, **OPTIONS).text
        for prompt in PROMPTS
        for seed in range(3)
    }
    engine.close()
    # OpenVINO keeps kernels for thousands of shapes, which takes minutes to fill. Here for a few: other growth shows.
    with served(f"tiny={tiny}", "--property", "CPU_RUNTIME_CACHE_CAPACITY=16") as (_, printed):
        url = printed["url"]
        before = warm_up(url, expected)
        tallies = asyncio.run(crowd(url, expected, MINUTES * 60))
        wait_until(lambda: metric(url, "vllm:num_requests_running") == 0)
        after = metric(url, "process_resident_memory_bytes")
        total = sum(tallies, Tally())
        answered = sorted(tally.total() for tally in tallies)
        print(f"{total}, a client's: {answered[0]} to {answered[-1]}; RSS {before / 1e6:.0f} → {after / 1e6:.0f} MB")
        assert total["whole"] > 0 < total["left"]
        assert after <= before * GROWTH
        body = {"model": "tiny", "max_tokens": 120, "temperature": 1, "ignore_eos": True}
        for (prompt, seed), text in expected.items():
            answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt, "seed": seed}, timeout=60)
            assert answer.json()["choices"][0]["text"] == text
