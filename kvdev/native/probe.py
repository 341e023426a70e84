"""The probe engine of the C core: one job's I/O, generated, timed and checked without the interpreter.

Not here: what jobs ask for and how results are shown (``kvdev_tools.probe``).
Threads: one drives a probe (``run``, which blocks without the interpreter lock); ``stop`` and ``result`` are for any.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev._core import ffi, lib
from kvdev.errors import UnsupportedError, UsageError
from kvdev.native.io import address_of
from kvdev.native.queue import _REFUSALS, HostQueue

BUCKET_COUNT = int(lib.KVDEV_PROBE_BUCKET_COUNT)
PIECE_COUNT_MAX = int(lib.KVDEV_PROBE_PIECES_MAX)
DEPTH_MAX = int(lib.KVDEV_PROBE_DEPTH_MAX)

STAT_DTYPE = np.dtype([("count", "<u8"), ("min", "<u8"), ("max", "<u8"), ("mean", "<f8"), ("square", "<f8")])
LAT_DTYPE = np.dtype([("stat", STAT_DTYPE), ("buckets", "<u8", (BUCKET_COUNT,))])
RESULT_DTYPE = np.dtype(
    [
        ("slat", LAT_DTYPE, (3,)),
        ("clat", LAT_DTYPE, (3,)),
        ("lat", LAT_DTYPE, (3,)),
        ("sync", LAT_DTYPE),
        ("bw", STAT_DTYPE, (3,)),
        ("iops", STAT_DTYPE, (3,)),
        ("bytes", "<u8", (3,)),
        ("ios", "<u8", (3,)),
        ("short_ios", "<u8", (3,)),
        ("drop_ios", "<u8", (3,)),
        ("runtime_ns", "<u8", (3,)),
        ("depth_map", "<u8", (7,)),
        ("submit_map", "<u8", (7,)),
        ("complete_map", "<u8", (7,)),
        ("submit_count", "<u8"),
        ("complete_count", "<u8"),
        ("clat_ns", "<u8", (10,)),
        ("clat_us", "<u8", (10,)),
        ("clat_ms", "<u8", (12,)),
        ("began_ns", "<u8"),
        ("ended_ns", "<u8"),
        ("error_count", "<u8"),
        ("first_error_offset", "<u8"),
        ("verified_bytes", "<u8"),
        ("bad_count", "<u8"),
        ("bad_offset", "<u8"),
        ("bad_interval", "<u8"),
        ("first_error", "<i4"),
        ("first_status", "<u2"),
        ("first_way", "u1"),
        ("bad_reason", "u1"),
        ("end_reason", "u1"),
        ("is_verifying", "u1"),
        ("is_running", "u1"),
        ("reserved", "u1"),
        ("in_flight", "<u4"),
        ("latency_depth", "<u4"),
    ],
    align=True,
)
"""``struct kvdev_probe_result``; a test compares the sizes."""
LOG_DTYPE = np.dtype(
    [
        ("time_ns", "<u8"),
        ("slat_ns", "<u8"),
        ("clat_ns", "<u8"),
        ("lat_ns", "<u8"),
        ("offset", "<u8"),
        ("byte_count", "<u4"),
        ("way", "<u4"),
    ]
)
"""``struct kvdev_probe_log_entry``."""

ResultArray = npt.NDArray[Any]
LogArray = npt.NDArray[Any]


class Verdict(enum.IntEnum):
    """What ``run`` returned for."""

    DONE = 0
    LOOK = 1
    LOG_FULL = 2


class EndReason(enum.IntEnum):
    """Why a job ended."""

    COMPLETE = 0
    STOPPED = 1
    ERROR = 2
    RATE = 3
    LATENCY = 4


class BadReason(enum.IntEnum):
    """What of a stored interval was wrong."""

    NONE = 0
    HEADER = 1
    PLACE = 2
    STALE = 3
    PAYLOAD = 4


@dataclass(frozen=True)
class ProbeMember:
    """A device of the queue (``memory_addr`` 0), or memory."""

    size_bytes: int
    max_transfer_bytes: int
    device_index: int = 0
    memory_addr: int = 0


class Probe:
    """One job in the core. ``keep`` is whatever owns the memory and devices that it uses."""

    def __init__(
        self,
        params: Mapping[str, Any],
        members: Sequence[ProbeMember],
        *,
        queue: HostQueue | None,
        keep: object = None,
    ) -> None:
        """``params`` are the fields of ``struct kvdev_probe_params``; what is left out is 0."""
        raw_params = ffi.new("struct kvdev_probe_params *", dict(params))
        raw_members = ffi.new(
            "struct kvdev_probe_member[]",
            [
                {
                    "memory_addr": member.memory_addr,
                    "size_bytes": member.size_bytes,
                    "device_index": member.device_index,
                    "max_transfer_bytes": member.max_transfer_bytes,
                }
                for member in members
            ],
        )
        out = ffi.new("struct kvdev_probe **")
        raw_queue = ffi.NULL if queue is None else queue._check_usable("probe")
        code = lib.kvdev_probe_create(raw_params, raw_members, raw_queue, out)
        if code == -errno.ENOMEM:
            raise MemoryError(
                "probe: no memory for the map of random offsets; use norandommap or a smaller size"
            )
        if code == -errno.E2BIG:
            raise UnsupportedError(
                f"probe: bs: expected blocks of at most {PIECE_COUNT_MAX} commands, got more",
                feature="block size",
            )
        if code:
            raise UsageError(
                "probe: block sizes: expected multiples of the device's block size that fit the region and the depth"
            )
        self._raw: Any = ffi.gc(out[0], lib.kvdev_probe_destroy)
        self._queue = queue
        self._keep = keep

    def set_start(self, start_ns: int) -> None:
        """When the first I/O may go out; before the first ``run``."""
        lib.kvdev_probe_start_set(self._raw, start_ns)

    def run(self, slice_ns: int) -> Verdict:
        """Work until the job has ended or for about that long; the caller holds the queue's lock."""
        code = int(lib.kvdev_probe_run(self._raw, slice_ns))
        if code < 0:
            raise UsageError(f"probe: queue: {self._refusal(code)}")
        return Verdict(code)

    def _refusal(self, code: int) -> str:
        if code != -errno.EINVAL or self._queue is None:
            return os.strerror(-code)
        reason_out, index_out = ffi.new("uint32_t *"), ffi.new("size_t *")
        lib.kvdev_queue_refusal_read(self._queue._check_usable("probe"), index_out, reason_out)
        field, expected = _REFUSALS.get(int(reason_out[0]), ("", "a command that the device takes"))
        return f"{field}: expected {expected}".removeprefix(": ")

    def look_after(self) -> None:
        """Let the queue's devices be looked at that asked for it, between two ``run``."""
        if self._queue is not None:
            self._queue._look_after()

    def stop(self) -> None:
        """Send nothing more; ``run`` ends when what is outstanding has."""
        lib.kvdev_probe_stop(self._raw)

    def result(self) -> ResultArray:
        """A copy of the counters as they are now, an array of one ``RESULT_DTYPE``."""
        raw = lib.kvdev_probe_result_read(self._raw)
        result: ResultArray = np.frombuffer(ffi.buffer(raw, RESULT_DTYPE.itemsize), dtype=RESULT_DTYPE).copy()
        return result

    def take_log(self, max_count: int = 65536) -> LogArray:
        """What has been logged since the last call."""
        entries: LogArray = np.empty(max_count, dtype=LOG_DTYPE)
        pointer = ffi.cast("struct kvdev_probe_log_entry *", address_of(entries))
        return entries[: int(lib.kvdev_probe_log_take(self._raw, pointer, max_count))]

    def preview(
        self, count: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """Offsets in the region, lengths and directions of the next I/Os, which are then not done."""
        offsets = np.empty(count, dtype=np.uint64)
        lengths = np.empty(count, dtype=np.uint64)
        ways = np.empty(count, dtype=np.uint8)
        found = int(
            lib.kvdev_probe_preview(
                self._raw,
                count,
                ffi.cast("uint64_t *", address_of(offsets)),
                ffi.cast("uint64_t *", address_of(lengths)),
                ffi.cast("uint8_t *", address_of(ways)),
            )
        )
        return offsets[:found], lengths[:found], ways[:found]


def bucket_of(value: int) -> int:
    """The bucket that a latency is counted in."""
    return int(lib.kvdev_probe_bucket_of(value))


def bucket_value(bucket: int) -> int:
    """The latency that a bucket stands for: the middle of its range."""
    return int(lib.kvdev_probe_bucket_value(bucket))


def bucket_values() -> npt.NDArray[np.uint64]:
    """``bucket_value`` of all buckets."""
    return np.array([bucket_value(bucket) for bucket in range(BUCKET_COUNT)], dtype=np.uint64)


def new_lat() -> npt.NDArray[Any]:
    """An empty histogram with its statistics, an array of one ``LAT_DTYPE``."""
    return np.zeros(1, dtype=LAT_DTYPE)


def add_sample(lat: npt.NDArray[Any], value: int) -> None:
    """Count one latency."""
    lib.kvdev_probe_lat_add(ffi.cast("struct kvdev_probe_lat *", address_of(lat)), value)


def merge_lat(into: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    """Add all samples of ``other``, as if they had come to ``into``; both contiguous, one ``LAT_DTYPE``."""
    lib.kvdev_probe_lat_merge(
        ffi.cast("struct kvdev_probe_lat *", address_of(into)),
        ffi.cast("const struct kvdev_probe_lat *", address_of(other)),
    )


def merge_stat(into: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    """As ``merge_lat`` for one ``STAT_DTYPE``."""
    lib.kvdev_probe_stat_merge(
        ffi.cast("struct kvdev_probe_stat *", address_of(into)),
        ffi.cast("const struct kvdev_probe_stat *", address_of(other)),
    )


def struct_sizes() -> tuple[int, int]:
    """Of ``struct kvdev_probe_result`` and ``struct kvdev_probe_log_entry`` in the core."""
    return int(lib.kvdev_probe_result_size()), int(ffi.sizeof("struct kvdev_probe_log_entry"))
