"""Files from elsewhere: valid ones with a few things changed, and any bytes; and what reading them may lead to.

    fuzz(lambda data: read_chat(written(data)), valid, damaged(valid), num_examples=100)

Some examples in the default tests, many in the slow ones, always the same; other ones, and as many as it says, with
OUTRIDER_EXAMPLES: `@few_or_many`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Path = tuple[str | int, ...]  # of a value in JSON: keys and places, from the outside in

few_or_many = pytest.mark.parametrize(
    "num_examples",
    [
        pytest.param(30, id="few"),
        pytest.param(int(os.environ.get("OUTRIDER_EXAMPLES", "500")), id="many", marks=pytest.mark.slow),
    ],
)
_LONGEST_MESSAGE = 3000  # characters
_LONGEST = timedelta(seconds=30)  # of one example, on a busy machine: longer is a hang
_ROOM = 16 << 20  # bytes that reading may take whatever the file's size
_DEEP = 200_000  # brackets: more than any parser's stack has room for
_NESTED = "nested without end"  # stands for them until JSON is written
_LENGTHS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_NAMES = ("", "x", "(", "\ud800", "0", "../x", "x" * 5000, "(.*.*.*.*.*)*=", "type", "__metadata__")
# What a value in JSON may be in place of the right one.
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**40, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "0", "x", "x" * 5000, "../../x", "/x", "a\0b", "\ud800", "(", "\N{SLIGHTLY SMILING FACE}", [],
    [[]], [None], [0], [-1, 2**70], ["x", 1], {}, {"": {}}, {"x": 1}, {"type": 1}, _NESTED, "[" * 20_000,
]  # fmt: skip


def fuzz(
    read: Callable[[bytes], object],
    valid: bytes,
    contents: st.SearchStrategy[bytes],
    num_examples: int,
    *,
    room: int = _ROOM,
    share: float = 60,
) -> None:
    """Read `valid`, which has to succeed, then examples of `contents`: each is read, or refused by an error of ours.

    Anything else fails: another error, a message of several lines, half a minute, or memory that does not follow from
    the content's size. room: bytes that are free. share: further bytes of memory a byte of the content.
    """
    read(valid)  # what is loaded at first use is loaded now

    @settings(max_examples=num_examples, deadline=_LONGEST, suppress_health_check=list(HealthCheck))
    @given(content=contents | st.binary(max_size=200))
    def check(content: bytes) -> None:
        tracemalloc.start()
        try:
            with contextlib.suppress(OutriderError):
                _read_in_a_line(read, content)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= room + share * len(content), f"{len(content):,} bytes took {peak:,} bytes of memory"

    check()


def _read_in_a_line(read: Callable[[bytes], object], content: bytes) -> None:
    try:
        read(content)
    except OutriderError as error:
        if len(str(error).splitlines()) != 1 or len(str(error)) > _LONGEST_MESSAGE:
            raise AssertionError(f"the message is no line: {str(error)[:200]!r}") from error
        raise


def damaged(valid: bytes) -> st.SearchStrategy[bytes]:
    """Bytes with a few edits: overwritten, cut, inserted, repeated, and numbers that could be lengths."""
    return st.builds(lambda data: _edited(data.draw, bytearray(valid)), st.data())


def damaged_json(valid: Any) -> st.SearchStrategy[bytes]:
    """A JSON text of `valid` with some values in it replaced, taken out, moved, or nested without end."""
    text = json.dumps(valid)
    return st.builds(lambda data: _edited_json(data.draw, json.loads(text)), st.data())


def _edited(draw: Callable[[st.SearchStrategy[Any]], Any], data: bytearray) -> bytes:
    for _ in range(draw(st.integers(1, 6))):
        if not data:
            break
        at, size = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 24))
        edit = draw(st.integers(0, 6))
        if edit == 0:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == 1:
            data[at : at + size] = draw(st.binary(min_size=size, max_size=size))
        elif edit == 2:
            del data[at : at + draw(st.sampled_from([1, size, len(data)]))]
        elif edit == 3:
            data[at:at] = draw(st.binary(min_size=1, max_size=24))
        elif edit == 4:
            start = draw(st.integers(0, len(data) - 1))
            data[at:at] = data[start : start + size * 8]
        else:
            width = draw(st.sampled_from([1, 2, 4, 8]))
            value = draw(st.sampled_from(_LENGTHS) | st.integers(0, 2 * len(data))) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, draw(st.sampled_from(["little", "big"])))
    return bytes(data)


def _edited_json(draw: Callable[[st.SearchStrategy[Any]], Any], made: Any) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        paths = [*_paths(made)]
        path = draw(st.sampled_from(paths))
        value = _at(made, path)
        edit = draw(st.integers(0, 5))
        if edit == 0 and path:
            made = _without(made, path)
        elif edit == 1 and path and isinstance(path[-1], str):
            made = _with(_without(made, path), (*path[:-1], draw(st.sampled_from(_NAMES))), value)
        elif edit == 2:
            made = _with(made, path, _at(made, draw(st.sampled_from(paths))))
        elif edit == 3:
            made = _with(made, path, [value])
        else:
            made = _with(made, path, draw(st.sampled_from(_VALUES)))
    return json.dumps(made).replace(json.dumps(_NESTED), "[" * _DEEP + "]" * _DEEP).encode()


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:50])  # of a vocabulary, some
    else:
        return
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(whole: Any, path: Path, value: Any) -> Any:
    """A copy in which `value` is at `path`."""
    if not path:
        return value
    made = whole.copy()
    made[path[0]] = _with(whole[path[0]], path[1:], value) if path[1:] else value
    return made


def _without(whole: Any, path: Path) -> Any:
    made = _at(whole, path[:-1]).copy()
    del made[path[-1]]
    return _with(whole, path[:-1], made)
