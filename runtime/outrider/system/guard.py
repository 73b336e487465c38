"""The guard that everything of an app's is called through: drafters, observers, tokenizers, callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from inspect import getattr_static
from types import TracebackType
from typing import Any, NamedTuple

from outrider.errors import OutriderError, one_line


class Guard:
    """Turns what an app's code raises into an error of ours, which says whose code that was.

        with Guard("cancel.is_set(), of a Flag,", RequestError, "Mend it, or pass a threading.Event."):
            cancelled = bool(cancel.is_set())

    SystemExit and KeyboardInterrupt too: in the engine's thread only an app's code raises them. A KeyboardInterrupt in
    the main thread is the user's Ctrl-C, and stays what it is. So do errors of ours.
    """

    __slots__ = ("_error", "_remedy", "_what")

    def __init__(self, what: str, error: type[OutriderError], remedy: str) -> None:
        self._what, self._error, self._remedy = what, error, remedy

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None, /) -> None:
        if error is None or isinstance(error, OutriderError) or is_interrupt(error):
            return
        raise self._error(f"{self._what} raised {type(error).__name__}: {one_line(error)}. {self._remedy}") from error


def is_interrupt(error: BaseException) -> bool:
    """Whether this is the user's Ctrl-C, which Python delivers to the main thread."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


class Rule(NamedTuple):
    """What a member has to be, or what it has to return, if `of_call`.

    text: such as "a finite number". holds: whether a value is one.
    """

    text: str
    holds: Callable[[Any], bool]
    of_call: bool = False


class Guarded:
    """An app's object, whose members are used through a `Guard`, and checked.

        drafter = Guarded(own, "the drafter 'own'", RULES, DrafterError, "Mend it, or choose another.", Drafter())

    rules: of its members, by name. defaults: has the members that it may lack. Whatever goes wrong raises `error`.
    """

    def __init__(
        self,
        inner: object,
        what: str,
        rules: Mapping[str, Rule],
        error: type[OutriderError],
        remedy: str,
        defaults: object = None,
    ) -> None:
        self.inner = inner
        self._what, self._rules, self._defaults = what, rules, defaults
        self._error, self._remedy = error, remedy
        self._missing: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        with self._guard(name):
            return self._taken(name, self._found(name))

    def _found(self, name: str) -> Any:
        """A member, or its default."""
        if name not in self._missing:
            try:
                return getattr(self.inner, name)
            except AttributeError:  # a property's own, too
                if not hasattr(self._defaults, name) or getattr_static(self.inner, name, self) is not self:
                    raise
            self._missing.add(name)  # it is asked for in every round
        return getattr(self._defaults, name)

    def _guard(self, name: str) -> Guard:
        return Guard(f"{name} of {self._what}", self._error, self._remedy)

    def _taken(self, name: str, value: Any) -> Any:
        """A member's value, checked; a method that is called through the guard."""
        rule = self._rules.get(name)
        if rule is None or not rule.of_call:
            return value if rule is None else self._checked(name, value, rule)

        def call(*args: Any, **options: Any) -> Any:
            with self._guard(f"{name}()"):
                return self._checked(f"{name}()", value(*args, **options), rule)

        return call

    def _checked(self, name: str, value: Any, rule: Rule) -> Any:
        """Called within a guard: a value may fail at being asked what it is."""
        if rule.holds(value):
            return value
        raise self._error(f"{name} of {self._what} is {repr(value)[:80]}, not {rule.text}. {self._remedy}")
