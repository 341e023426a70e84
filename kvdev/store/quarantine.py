"""Places that a write of unknown fate may still reach: not written again until it cannot.

Not here: when that is (``VolumeIo.is_fenced``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvdev.errors import CommandError, KvdevError, TransportError


def is_fate_unknown(error: BaseException) -> bool:
    """Whether a write that ended like this may still reach the medium: all but what a device itself refused."""
    return isinstance(error, TransportError) or not isinstance(error, (CommandError, KvdevError))


class Quarantine:
    """Numbers of places, each with the time since which a write to it is missing."""

    def __init__(self, is_fenced: Callable[[int], bool]) -> None:
        self._is_fenced = is_fenced
        self._since_ns: dict[int, int] = {}

    def add(self, places: Iterable[int], *, since_ns: int) -> None:
        """``since_ns``: monotonic time before the writes were sent."""
        for place in places:
            self._since_ns[place] = since_ns

    def release(self) -> list[int]:
        """Let go of the places that nothing can reach any more; returns them."""
        times = {since_ns: self._is_fenced(since_ns) for since_ns in set(self._since_ns.values())}
        free = [place for place, since_ns in self._since_ns.items() if times[since_ns]]
        for place in free:
            del self._since_ns[place]
        return free

    def __contains__(self, place: int) -> bool:
        return place in self._since_ns

    def __len__(self) -> int:
        return len(self._since_ns)

    def __iter__(self) -> Iterator[int]:
        return iter(self._since_ns)
