"""A model whose device fails is loaded again; what ran at the time ends with an error, and nothing waits for ever."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

import outrider
from outrider.models.backends.infer_calls import InferCalls
from serving import MESSAGES, Live, wait_until

OPTIONS: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "extra_body": {"ignore_eos": True, "drafter": "none"}}
UNLOADED = "The model was unloaded while this request ran. Send it again."


class Device:
    """Calls that end when the test says so, of which those of some graphs fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_end = threading.Event()
        self.failing: object = None  # a graph
        self._wait = InferCalls.wait
        monkeypatch.setattr(InferCalls, "wait", lambda calls: self.wait(calls))
        self.calls_end.set()

    def wait(self, calls: InferCalls) -> None:
        self._wait(calls)
        self.calls_end.wait(60)
        if calls.graph is self.failing:
            with calls.graph.calling(begins=False):
                raise RuntimeError("of the test's")


def test_a_model_whose_device_failed_is_loaded_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(stream: bool) -> str:
        """The text, or the error."""
        try:
            made = client.chat.completions.create(**OPTIONS, max_tokens=10, stream=stream)
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in made)
            return str(made.choices[0].message.content)
        except openai.APIError as error:
            return f"error {getattr(error, 'status_code', 500)}: {error}"  # that of a stream has no status

    client, first = live.client(), live.engine()
    expected = first.generate(MESSAGES, max_new_tokens=10, ignore_eos=True, drafter=None).text
    graph = first.main._calls.graph  # type: ignore[attr-defined]
    device = Device(monkeypatch)
    with ThreadPoolExecutor(8) as pool:

        def begin(count: int) -> list[Future[str]]:
            """Requests that are running, whose call does not end."""
            device.calls_end.clear()
            asked = [pool.submit(ask, bool(i % 2)) for i in range(count)]
            running = f'num_requests_running{{model_name="tiny"}} {count}.0'.encode()
            wait_until(
                lambda: running in live.service.metrics.text() and live.engine().cache["main"].num_used_tokens > 0
            )
            return asked

        asked = begin(4)
        device.failing = graph
        device.calls_end.set()
        wait_until(lambda: first.has_failed)
        asked += [pool.submit(ask, bool(i % 2)) for i in range(4)]  # some find the failed engine, some one that loads
        found = [each.result(60) for each in asked]
        failed = found[:4]  # those that had not reached the engine when it was closed are told to come back
        assert all(
            (each.startswith("error 500: ") and ("of the test's" in each or "failed in an earlier call" in each))
            or (each.startswith("error 503: ") and UNLOADED in each)
            for each in failed
        ), failed
        assert any("of the test's" in each for each in failed)
        assert found[4:] == [expected] * 4
        wait_until(lambda: live.is_idle)
        with pytest.raises(outrider.RequestError, match="closed"):
            first.generate("Hi")

        asked, second = begin(2), live.engine()
        assert second is not first
        closing = pool.submit(second.close)  # as an app could
        wait_until(lambda: not second.is_working)
        device.calls_end.set()
        closing.result(60)
        ended = [each.result(60) for each in asked]
        assert ended[0].startswith("error 503: ")
        assert all(UNLOADED in each for each in ended)
        assert ask(stream=False) == expected
        assert live.engine() is not second
