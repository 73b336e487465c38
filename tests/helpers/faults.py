"""Every fault that an app's code can bring, derived from the interfaces: a new member is in it by itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import numpy as np

from outrider.drafters import Ngram, Suffix
from outrider.types import Draft, Drafter, Guess, Requirements


class Unspeakable(BaseException):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


ERRORS: tuple[type[BaseException], ...] = (ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, Unspeakable)
VALUES: tuple[Any, ...] = (
    None, True, -1, 10**20, 0.5, float("nan"), float("inf"), "text", b"bytes", object(), (), [], [None], [-1, 10**9],
    [1.5], (1, 2), {1: 2}, np.int64(3), np.array([17]), np.array([[1.0, np.nan]]), [np.int64(1)], [[1]], iter([1]),
)  # fmt: skip


def members_of(interface: type) -> dict[str, bool]:
    """The public members of an interface and of those it extends, and whether each is a method."""
    found: dict[str, bool] = {}
    for base in interface.__mro__:
        if base not in (object, Protocol, Generic):
            found |= {name: callable(member) for name, member in vars(base).items()}
            found |= dict.fromkeys(vars(base).get("__annotations__", {}), False)
    return {name: is_method for name, is_method in found.items() if not name.startswith("_")}


@dataclass
class Fault:
    """What goes wrong with one member of an app's object: it raises `error`, or else gives `value`.

    count: how often that came up.
    """

    member: str
    error: type[BaseException] | None = None
    value: Any = None
    is_method: bool = True
    count: int = 0

    def __str__(self) -> str:
        what = self.error.__name__ if self.error else f"{type(self.value).__name__} {self.value!r}"[:60]
        return f"{self.member}: {what}"

    def bring(self, *_: Any, **__: Any) -> Any:
        """Raise, or give the value."""
        self.count += 1
        if self.error is not None:
            raise self.error("of an app's")
        return self.value(*_) if callable(self.value) else self.value


def faults_of(
    members: dict[str, bool], values: Sequence[Any] = VALUES, errors: Sequence[Any] = ERRORS
) -> Iterator[Fault]:
    """Each error and each value for each member; of a method also an attribute in its place."""
    for member, is_method in members.items():
        for error in errors:
            yield Fault(member, error, is_method=is_method)
        for value in values:
            yield Fault(member, value=value, is_method=is_method)
        if is_method:
            yield Fault(member, value=None, is_method=False)


class Faulty:
    """An app's object that is sound but for one member."""

    def __init__(self, sound: object, fault: Fault | None = None) -> None:
        self.sound, self.fault = sound, fault

    def __getattr__(self, name: str) -> Any:
        fault = self.fault
        if fault is None or name != fault.member:
            return getattr(self.sound, name)
        return fault.bring if fault.is_method else fault.bring()


class Recorder(Faulty):
    """Remembers which members were used."""

    def __init__(self, sound: object) -> None:
        super().__init__(sound)
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getattr__(name)


class Plain(Ngram):
    """An app's drafter of the simplest kind, which also drafts ahead, and has what a drafter may have."""

    is_priced, goes_ahead, takes_rules, requirements = False, True, True, Requirements()
    seconds = ahead_seconds = 0.0

    def observe(self, sequence: Any, committed: Any) -> None: ...


class Priced(Suffix):
    """An app's drafter that a controller chooses, as it costs next to nothing."""

    is_free, goes_ahead, at_once = False, True, False
    name, takes_rules, requirements = "priced", True, Requirements()

    def seconds_for(self, num_tokens: Any, context: Any, before: Any = None) -> float:
        return 1e-9

    def guess(self, request: Any, draft: Any, chance: Any, next_chance: Any) -> Guess | None:
        return Guess(1.0, len(draft))

    def propose(self, requests: Any) -> list[Draft]:
        return [Draft(request.sequence.token_ids[: request.limit]) for request in requests]


class Trees(Plain):
    """A sound drafter of trees."""

    def propose(self, requests: Any) -> list[Draft]:
        """The newest token again, or the first one, and one behind."""
        return [self.tree(request) for request in requests]

    def tree(self, request: Any) -> Draft:
        if request.limit < 3 or not request.trees:
            return Draft([])
        first, *_, last = request.sequence.token_ids
        return Draft([last, (last + 1) % 400, first], parents=[-1, -1, 0])


# Sound drafters, and the options of a request that bring each one's members into use.
SOUND: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "ruled": (Plain, {"assistant_confidence_threshold": 0.5}),
    "free": (Suffix, {}),
    "priced": (Priced, {}),
}
DRAFTER = members_of(Drafter)
