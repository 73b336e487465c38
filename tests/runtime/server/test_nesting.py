"""Bodies in which anything is nested so deeply that a library's recursive parser would end the server."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bodies import BODIES, COMPLETION, FORMAT
from serving import TEMPLATE, served
from tiny import write_checkpoint, write_gguf

pytest.importorskip("llguidance", reason="the extra [structured]")

LEVELS = 100_000
TEXT = "[" * LEVELS + "]" * LEVELS
NESTED = {
    "lists": TEXT,
    "tables": '{"a":' * LEVELS + "1" + "}" * LEVELS,
    "text": json.dumps(TEXT),
    "a few thousand": json.dumps("[" * 5_000 + "]" * 5_000),  # no crash, but a text of 12 million tokens
    "a few hundred": "[" * 900 + "]" * 900,
}


def chain(kind: str, count: int) -> dict[str, Any]:
    """A body whose grammar leads from one definition to the next, none of which is nested."""
    if kind == "schema":
        definitions: dict[str, Any] = {
            f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)
        }
        schema = {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "string"}}}
        return FORMAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    name = "r" if kind == "rules" else "R"
    rules = "".join(f"{name}{i}: {name}{i + 1}\n" for i in range(count))
    return COMPLETION | {"regex": None, "grammar": f'start: {name}0\n{rules}{name}{count}: "a"\n'}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a server in a process of its own, of a model that calls functions."""
    from outrider_export import export_bundle

    root = tmp_path_factory.mktemp("calling")
    write_checkpoint(root / "checkpoint")
    write_gguf(root / "tiny.gguf", root / "checkpoint", "Q4_1", "qwen2", {"tokenizer.chat_template": TEMPLATE})
    folder: Path = export_bundle(root / "tiny.gguf", output=root / "bundle", weights="int4").folder
    with served(f"tiny={folder}") as (process, ready):
        with httpx.Client(base_url=ready["url"], timeout=300) as client:
            yield client
        assert process.poll() is None


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body, with those of tables and lists."""
    if path:
        yield path
    for key in body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ():
        yield from places(body[key], (*path, key))


def with_nested(body: dict[str, Any], path: tuple[Any, ...], nested: str) -> bytes:
    """The body with something else at a place. It is too deep for `json.dumps`."""
    made: Any = copy.deepcopy(body)
    *before, last = path
    inner = made
    for key in before:
        inner = inner[key]
    inner[last] = "@@"
    return json.dumps(made).replace('"@@"', nested).encode()


def status(client: httpx.Client, address: str, content: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    return client.post(f"/v1/{address}", content=content, headers=headers).status_code


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nested", NESTED)
def test_nothing_that_is_nested_ends_the_server(client: httpx.Client, nested: str) -> None:
    found = {}
    for address, body in BODIES:
        assert status(client, address, json.dumps(body).encode()) == 200
        for path in places(body):
            found[path] = status(client, address, with_nested(body, path, NESTED[nested]))
    assert {path: code for path, code in found.items() if code not in (200, 400, 404)} == {}
    assert 400 in found.values()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["schema", "rules", "terminals"])
def test_no_chain_of_definitions_ends_the_server(client: httpx.Client, kind: str) -> None:
    address = "chat/completions" if kind == "schema" else "completions"
    assert status(client, address, json.dumps(chain(kind, 500)).encode()) == 200
    assert status(client, address, json.dumps(chain(kind, 20_000)).encode()) in (200, 400)
    assert status(client, address, json.dumps(chain(kind, 2)).encode()) == 200
