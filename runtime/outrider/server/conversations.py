"""Conversations that later requests may go on with, and the items of their answers, in memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec

from outrider.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is kept of an answer. size: characters. items: ids of its items and of what it answers.

    before: all items that it follows. response: the whole answer.
    """

    turns: Sequence[Mapping[str, Any]] = ()
    size: int = 0
    items: Sequence[str] = ()
    before: Sequence[Any] = ()
    response: Mapping[str, Any] | None = None


class Conversations:
    """Stores what was said up to an answer, by the answer's id, and the items of the answer by theirs.

        conversations.add("resp_1", turns, response=response, given=items)      # turns: for the chat template
        conversations.turns("resp_1")
        conversations.item("msg_1", "input[1]")
        response, items = conversations.find("resp_1")

    max_size: characters of all conversations. The one that was used least recently goes first. Several threads may
    use it.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._items: dict[str, tuple[str, Any]] = {}  # with their answers' ids
        self._size = 0
        self._lock = Lock()

    def add(
        self,
        name: str,
        turns: Sequence[Mapping[str, Any]],
        previous: str | None = None,
        response: Mapping[str, Any] | None = None,
        given: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Store the turns up to an answer, unless they are larger than all that is stored may be.

        previous: an answer whose turns they begin with. These are shared, though counted again. given: the items that
        it answers besides, with ids of the server's own: those that clients choose may be another client's, too.
        """
        with self._lock:
            known = self._stored.get(previous or "", _Stored())
        said = max(len(json.dumps(turns[len(known.turns) :])), len(msgspec.json.encode(given)))  # which share texts
        size = known.size + said + (0 if response is None else len(msgspec.json.encode(response)))
        if size > self._max_size:
            return  # and nothing else goes for it
        output = known.response["output"] if known.response else []
        before = [*known.before, *output, *given]
        items = {item["id"]: item for item in given} | {
            item["id"]: item for item in (response["output"] if response else ())
        }
        with self._lock:
            self._stored[name] = _Stored(turns, size, [*items], before, response)
            self._items |= {item_id: (name, item) for item_id, item in items.items()}
            self._size += size
            while self._size > self._max_size:
                self._drop(next(iter(self._stored)))

    def turns(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The turns up to an answer.

        Raises:
            ApiError: with status 400, when the answer is not stored, or not any more.
        """
        if (stored := self._used(name)) is None:
            message = f"There is no response '{name[:100]}', or it is no longer stored. Send its turns as input."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return stored.turns

    def find(self, name: str) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """An answer, and all items that it follows, the oldest first: those of answers before, and as they were given.

        Raises:
            ApiError: with status 404, when it is not stored, or not any more.
        """
        stored = self._used(name)
        if stored is None or stored.response is None:
            message = f"There is no response '{name[:100]}', or it is no longer stored."
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return stored.response, stored.before

    def _used(self, name: str) -> _Stored | None:
        with self._lock:
            if name in self._stored:
                self._stored.move_to_end(name)
            return self._stored.get(name)

    def delete(self, name: str) -> None:
        """Forget an answer and its items. Those that follow it keep theirs. Raises ApiError as `find`."""
        self.find(name)
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        dropped = self._stored.pop(name)
        self._size -= dropped.size
        for item_id in dropped.items:
            del self._items[item_id]

    def item(self, item_id: str, place: str) -> Any:
        """An item of an answer. place: of the reference to it, for the error.

        Raises:
            ApiError: with status 400, when it is not stored, or not any more.
        """
        name, item = self._items.get(item_id, ("", None))
        if self._used(name) is None:
            message = f"There is no item '{item_id[:100]}', or it is no longer stored. Send the item itself."
            raise ApiError(400, message, param=place, code="item_not_found")
        return item
