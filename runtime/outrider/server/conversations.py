"""Conversations that later requests may go on with, and the items of their answers, in memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outrider.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is kept of an answer. size: characters. items: ids of its items."""

    turns: Sequence[Mapping[str, Any]] = ()
    size: int = 0
    items: Sequence[str] = ()


class Conversations:
    """Stores what was said up to an answer, by the answer's id, and the items of the answer by theirs.

        conversations.add("resp_1", turns, items={"msg_1": message})      # turns: for the chat template
        conversations.turns("resp_1")
        conversations.item("msg_1", "input[1]")

    max_size: characters of all conversations. The one that was used least recently goes first. Belongs to one event
    loop.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._items: dict[str, tuple[str, Any]] = {}  # with their answers' ids
        self._size = 0

    def add(
        self,
        name: str,
        turns: Sequence[Mapping[str, Any]],
        previous: str | None = None,
        items: Mapping[str, msgspec.Struct] | None = None,
    ) -> None:
        """Store the turns up to an answer, unless they are larger than all that is stored may be.

        previous: an answer whose turns they begin with. These are shared, though counted again. items: the answer's.
        """
        items = items or {}
        known = self._stored.get(previous or "", _Stored())
        size = known.size + len(json.dumps(turns[len(known.turns) :]))
        size += sum(len(msgspec.json.encode(item)) for item in items.values())
        if size > self._max_size:
            return  # and nothing else goes for it
        self._stored[name] = _Stored(turns, size, [*items])
        self._items |= {item_id: (name, item) for item_id, item in items.items()}
        self._size += size
        while self._size > self._max_size:
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size
            for item_id in oldest.items:
                del self._items[item_id]

    def turns(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The turns up to an answer.

        Raises:
            ApiError: with status 400, when the answer is not stored, or not any more.
        """
        if name not in self._stored:
            message = f"There is no response '{name[:100]}', or it is no longer stored. Send its turns as input."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        self._stored.move_to_end(name)
        return self._stored[name].turns

    def item(self, item_id: str, place: str) -> Any:
        """An item of an answer. place: of the reference to it, for the error.

        Raises:
            ApiError: with status 400, when it is not stored, or not any more.
        """
        if item_id not in self._items:
            message = f"There is no item '{item_id[:100]}', or it is no longer stored. Send the item itself."
            raise ApiError(400, message, param=place, code="item_not_found")
        name, item = self._items[item_id]
        self._stored.move_to_end(name)
        return item
