"""Conversations that later requests may go on with, in memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.errors import ApiError


class Conversations:
    """Stores what was said up to an answer, by the answer's id.

        conversations.add("resp_1", turns)      # for the chat template
        conversations.turns("resp_1")

    max_size: characters of all conversations. The one that was used least recently goes first. Belongs to one event
    loop.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._stored: OrderedDict[str, tuple[Sequence[Mapping[str, Any]], int]] = OrderedDict()
        self._size = 0

    def add(self, name: str, turns: Sequence[Mapping[str, Any]], previous: str | None = None) -> None:
        """Store the turns up to an answer, unless they are larger than all that is stored may be.

        previous: an answer whose turns they begin with. These are shared, though counted again.
        """
        known, size = self._stored.get(previous or "", ((), 0))
        size += len(json.dumps(turns[len(known) :]))
        if size > self._max_size:
            return  # and nothing else goes for it
        self._stored[name] = (turns, size)
        self._size += size
        while self._size > self._max_size:
            _, (_, oldest) = self._stored.popitem(last=False)
            self._size -= oldest

    def turns(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The turns up to an answer.

        Raises:
            ApiError: with status 400, when the answer is not stored, or not any more.
        """
        if name not in self._stored:
            message = f"There is no response '{name[:100]}', or it is no longer stored. Send its turns as input."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        self._stored.move_to_end(name)
        return self._stored[name][0]
