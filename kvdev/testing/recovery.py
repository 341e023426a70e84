"""What tests of recovery wait for: conditions and events, however busy the machine is; and what may not be left over.

Not here: the targets and networks that fail (``killable``, ``proxy``, ``peer``).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvdev.clock import Deadline
from kvdev.initiator.event import EventKind, HostEvent
from kvdev.initiator.subsystem import Subsystem

WAIT_S = 60.0
"""For what takes milliseconds on an idle machine."""
_STEP_S = 0.01


def soon(seconds: float = WAIT_S) -> Deadline:
    return Deadline.after(seconds)


def until(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_S) -> None:
    """Wait until ``condition`` holds; AssertionError naming ``what`` when it does not come to pass."""
    limit, pause = soon(seconds), threading.Event()
    while not condition():
        assert not limit.is_expired, f"not within {seconds:g} s: {what}"
        pause.wait(_STEP_S)


def wait_event(subsystem: Subsystem, kind: EventKind, *, seconds: float = WAIT_S) -> HostEvent:
    """The next event of this kind; those before it are dropped."""
    limit = soon(seconds)
    while (event := subsystem.take_event(deadline=limit)) is not None:
        if event.kind is kind:
            return event
    raise AssertionError(f"no event {kind.value}")


def descriptor_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def nothing_left_over() -> Iterator[None]:
    """Descriptors and threads are as before in the end, whatever failed meanwhile; what is ending may take its time."""
    gc.collect()  # what earlier work left to the collector would go meanwhile, and hide as much
    descriptors, threads = descriptor_count(), threading.active_count()
    yield
    until(lambda: descriptor_count() <= descriptors, "no more descriptors than before")
    until(lambda: threading.active_count() <= threads, "no more threads than before")
