"""Chat templates, laid out in a process of their own, within limits: they come with a model and are not trusted."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outrider.inputs.template_child import LaidOutText, TemplateUse, lay_out
from outrider.system.children import ChildPool, NoChild

log = logging.getLogger("outrider")

RENDER_SECONDS = 10.0  # of processor time
RENDER_MEMORY = 256 << 20  # bytes, and `_BYTES_PER_CHARACTER` for each of the messages in JSON
MAX_SOURCE = 200_000  # characters of a template
MAX_TEXT = 4_000_000  # characters of a text that a template makes, and twice those of the messages
_BYTES_PER_CHARACTER = 64


class TemplateLimit(Exception):
    """A template exceeds a limit."""


class TemplateRefusal(Exception):
    """What a template, or Python, says of what it is given."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template. variables: JSON values.

    Raises:
        TemplateLimit: when it exceeds a limit.
        TemplateRefusal: when it raises something else, or is no template.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateLimit(f"it has {len(source):,} characters, and {MAX_SOURCE:,} are allowed")
    given = json.dumps(variables)
    memory, longest = RENDER_MEMORY + _BYTES_PER_CHARACTER * len(given), MAX_TEXT + 2 * len(given)
    use = TemplateUse(source=source, variables=given, longest=longest, seconds=RENDER_SECONDS, memory=memory)
    try:
        made = _pool(os.getpid()).ask(use, LaidOutText)
    except NoChild as error:
        log.warning("Chat templates are laid out without limits of time and memory: %s.", error)
        made = lay_out(use)
    if made.error:
        raise TemplateRefusal(made.error)
    if made.beyond:
        limits = {
            "seconds": f"it takes more than {RENDER_SECONDS:g} seconds",
            "memory": f"it takes more than {memory >> 20:,} MB of memory",
            "levels": "it is nested, or calls itself, too deeply",
            "text": f"it makes a text of more than {longest:,} characters",
            "process": "it ends its process, as one does that takes too much time or memory",
        }
        raise TemplateLimit(limits[made.beyond])
    return made.text


def start_templates() -> None:
    """Start the process that templates are laid out in, if there can be one."""
    with suppress(NoChild):
        _pool(os.getpid()).start()


@functools.cache
def _pool(_: int) -> ChildPool:
    """Of this process: a fork of it has its own."""
    return ChildPool("outrider.inputs.template_child")
