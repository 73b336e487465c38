from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [server]")
pytest.importorskip("openai", reason="the client that the server is tested with")

from collections.abc import Iterator
from pathlib import Path

import httpx

import outrider
from serving import Live, serving


@pytest.fixture(scope="package")
def live(tiny: Path) -> Iterator[Live]:
    """A server of the tiny bundle, with the default limits, loaded."""
    with serving({"tiny": tiny}) as live:
        live.client().completions.create(model="tiny", prompt="Hi", max_tokens=1)
        yield live


@pytest.fixture
def client(live: Live) -> Any:
    return live.client()


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    """For requests that no client library writes."""
    with httpx.Client(base_url=live.url, timeout=300) as client:
        yield client


@pytest.fixture
def engine(live: Live) -> outrider.Engine:
    """The server's own."""
    return live.engine()


@pytest.fixture(scope="package")
def caller(tiny: Path) -> Iterator[Any]:
    """A client of a model that was told how to call functions."""
    with serving({"tiny": tiny}, calls=True) as live:
        yield live.client()
