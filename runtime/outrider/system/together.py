"""Does several things at the same time, each in a thread.

    first, second = together([partial(core.compile_model, model) for model in models])
    first.result()
    with start([partial(core.compile_model, large)]) as (made,):
        ...    # meanwhile
    made.result()

OpenVINO prepares a graph in one thread, and meanwhile lets other Python threads run.
"""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from outrider.system.progress import report

T = TypeVar("T")


def together(makes: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Call functions at the same time, as many as there are threads. Returns when all are done, with what each made."""
    with ThreadPoolExecutor(max(1, min(len(makes), os.cpu_count() or 1))) as pool:
        return [pool.submit(contextvars.copy_context().run, make) for make in makes]


@contextmanager
def start(makes: Sequence[Callable[[], T]]) -> Iterator[list[Future[T]]]:
    """Call functions in another thread, one after the other, while the caller goes on. All are done at the block's end.

    If the block fails, those that have not begun are left out.
    """
    pool = ThreadPoolExecutor(1)
    failed = True
    try:
        yield [pool.submit(contextvars.copy_context().run, make) for make in makes]
        failed = False
    finally:
        pool.shutdown(cancel_futures=failed)


def reported(make: Callable[[], T], what: str, num_bytes: int) -> T:
    """Call a function, which reads so many bytes, in another thread, and say each second that it goes on."""
    began = time.monotonic()
    with start([make]) as (made,):
        while not wait([made], 1.0).done:
            done, expected = time.monotonic() - began, num_bytes / 1e9  # about
            report(f"{what}: {done:.0f} s{f' of about {expected:.0f}' if done < expected else ''}.")
    return made.result()
