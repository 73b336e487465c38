"""A model whose device fails is loaded again; what ran at the time ends with an error, and nothing waits for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import outrider
from outrider.models.backends.infer_calls import InferCalls
from outrider.server import Settings
from serving import MESSAGES, serving, wait_until

ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "extra_body": {"ignore_eos": True, "drafter": "none"}}


def test_a_model_whose_device_failed_is_loaded_again(
    tiny: Path, engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, wait, shared = threading.Event(), InferCalls.wait, engine.main._calls.graph  # type: ignore[attr-defined]

    def fail(calls: InferCalls) -> None:
        wait(calls)
        if fails.is_set() and calls.graph is not shared:
            raise calls.graph.failed(RuntimeError("of the test's"))

    def ask(stream: bool) -> str:
        """The text, or the error."""
        try:
            made = client.chat.completions.create(**ASKED, max_tokens=400, stream=stream)
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in made)
            return str(made.choices[0].message.content)
        except openai.APIError as error:
            return f"error {getattr(error, 'status_code', 500)}: {error}"  # that of a stream has no status

    monkeypatch.setattr(InferCalls, "wait", fail)
    with serving({"tiny": tiny}, Settings()) as live, ThreadPoolExecutor(8) as pool:
        client = live.client()
        client.chat.completions.create(**ASKED, max_tokens=1)
        first = live.engine()
        asked = [pool.submit(ask, bool(i % 2)) for i in range(4)]
        wait_until(lambda: live.service.models.find("tiny").num_users == 4 and first.cache["main"].num_used_tokens > 0)
        fails.set()
        wait_until(lambda: first.has_failed)
        fails.clear()
        asked += [pool.submit(ask, bool(i % 2)) for i in range(4)]  # some find the failed engine, some one that loads
        found = [each.result(60) for each in asked]
        assert live.engine() is not first
        expected = engine.generate(MESSAGES, max_new_tokens=400, ignore_eos=True, drafter=None).text
        assert all(each.startswith("error 500: ") for each in found[:4])
        assert found[4:] == [expected] * 4
        assert all("of the test's" in each or "failed in an earlier call" in each for each in found[:4])
        wait_until(lambda: live.is_idle)
        with pytest.raises(outrider.RequestError, match="closed"):
            first.generate("Hi")
        fails.set()
        assert [ask(stream)[:10] for stream in (False, True)] == ["error 500:"] * 2  # it failed again, once loaded
        fails.clear()
        assert ask(stream=False) == expected
        assert live.is_idle
        asked = [pool.submit(ask, stream) for stream in (False, True)]
        wait_until(lambda: live.engine().cache["main"].num_used_tokens > 0)
        live.engine().close()  # as when it is loaded again under a request
        ended = [each.result(60) for each in asked]
        assert ended[0].startswith("error 503: ")
        assert all("The model was unloaded while this request ran. Send it again." in each for each in ended)
