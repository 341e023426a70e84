"""Faults on a real device, for drills: a queue that stands before the device's own and lets things go wrong.

Not here: what goes wrong (``kvdev.drill``); faults of the embedded target (``kvdev.target``); which devices
(``kvdev.session``).
Threads: as every queue, one at a time; no thread of its own.
"""

from __future__ import annotations

import errno
import heapq
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdev.block.device import POLL_COUNT_MAX, BlockDevice, IoQueue, aligned_buffer
from kvdev.block.local import check_ios
from kvdev.clock import NS_PER_MS, NS_PER_S, SYSTEM_CLOCK, Deadline
from kvdev.drill import DrillPlan
from kvdev.errors import KvdevError, QueueFullError, UsageError
from kvdev.native.io import (
    EUNCERTAIN,
    IO_DONE_DTYPE,
    IO_MAY_COPY,
    OPCODE_COMPARE,
    OPCODE_READ,
    OPCODE_VERIFY,
    OPCODE_WRITE,
    OPCODE_WRITE_ZEROES,
    IoArray,
    IoDoneArray,
    address_of,
    bytes_at,
    count_down_group,
)
from kvdev.units import MIB

STATUS_INTERNAL_ERROR = 0x006
STATUS_WRITE_FAULT = 0x280
STATUS_READ_ERROR = 0x281
"""Base 4.2.3: media and data integrity errors 80h and 81h."""

_READS = frozenset((OPCODE_READ, OPCODE_COMPARE, OPCODE_VERIFY))
_CHECKED = (OPCODE_READ, OPCODE_WRITE, OPCODE_COMPARE, OPCODE_WRITE_ZEROES)
_DRAW_COUNT = 6
"""Random numbers that each command takes, whatever is on: so that the same command meets the same fate."""
NEVER_NS = 1 << 63


@dataclass
class DrillCounts:
    """What a drill did so far."""

    commands: int = 0
    delayed: int = 0
    failed: int = 0
    dropped: int = 0
    corrupted: int = 0
    corrupted_writes: int = 0
    throttled: int = 0
    reordered: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in vars(self).items())


@dataclass(slots=True)
class _Command:
    """One command from ``submit`` to the poll that hands its completion out."""

    io: IoArray
    tag: int
    group_addr: int
    submit_ns: int
    send_ns: int
    """When it may be sent to the device; ``NEVER_NS``: not at all."""
    delay_ns: int = 0
    lost_ns: int = 0
    """When a dropped one is given up; 0 where its completion comes."""
    error: int = 0
    status: int = 0
    bit: int = -1
    """Of a read's payload that is flipped."""
    payload: npt.NDArray[np.uint8] | None = None
    """A copy with a flipped bit, written in the payload's stead."""
    done: IoDoneArray | None = None


class _Drilled:
    """A device with its plan, its generator, and the time at which its throttle lets the next command through."""

    def __init__(self, device: BlockDevice, plan: DrillPlan) -> None:
        self.device = device
        self.plan = plan
        self.random = np.random.default_rng(plan.seed)
        self.counts = DrillCounts()
        self.free_ns = 0


class DrillQueue:
    """A queue (``kvdev.block.IoQueue``) over one that has no other user; what it does not know is that one's.

    Only commands that are submitted meet a fault: fused pairs and reservations pass.
    """

    def __init__(self, base: IoQueue) -> None:
        self._base = base
        self.lock = base.lock
        self._devices: dict[int, _Drilled] = {}
        self._commands: dict[int, _Command] = {}
        self._waiting: list[int] = []
        """Keys of commands not yet sent."""
        self._ready: list[tuple[int, int]] = []
        """A heap of the time at which a completion may be handed out, and the command's key."""
        self._key_next = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def put_on(self, device: BlockDevice, plan: DrillPlan) -> None:
        """Have the faults of ``plan`` happen to a device of the base queue from now on."""
        self._devices[device.device_index] = _Drilled(device, plan)
        device.drill = plan
        device.queue = self

    def counts(self, device: BlockDevice) -> DrillCounts:
        return self._devices[device.device_index].counts

    @property
    def capacity_count(self) -> int:
        return self._base.capacity_count

    @property
    def outstanding_count(self) -> int:
        return len(self._commands)

    # ---- submitting ----

    def submit(self, ios: IoArray) -> None:
        room = self.capacity_count - len(self._commands)
        if len(ios) > room:
            raise QueueFullError(f"drill: expected at most {room} commands, got {len(ios)}")
        for device_index in np.unique(ios["device_index"]).tolist():
            if device_index not in self._devices:
                raise UsageError(f"queue: device_index {device_index}: no such device")
            mine = ios[(ios["device_index"] == device_index) & np.isin(ios["opcode"], _CHECKED)]
            check_ios(self._devices[device_index].device, mine)
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        for index in range(len(ios)):
            self._take(ios[index : index + 1].copy(), now_ns)

    def _take(self, io: IoArray, now_ns: int) -> None:
        """Decide what becomes of one command."""
        drilled = self._devices[int(io["device_index"][0])]
        key, self._key_next = self._key_next, self._key_next + 1
        command = _Command(io, int(io["tag"][0]), int(io["group_addr"][0]), now_ns, now_ns)
        io["tag"] = key
        io["group_addr"] = 0  # counted down here, when its command completes for its owner
        self._commands[key] = command
        self._draw(drilled, command, now_ns)
        if command.send_ns == NEVER_NS:
            due_ns = command.lost_ns or now_ns + command.delay_ns
            heapq.heappush(self._ready, (due_ns, key))
        else:
            self._waiting.append(key)

    def _draw(self, drilled: _Drilled, command: _Command, now_ns: int) -> None:
        plan, counts, io = drilled.plan, drilled.counts, command.io
        opcode = int(io["opcode"][0])
        is_read = opcode in _READS
        fate = drilled.random.random(_DRAW_COUNT).tolist()
        counts.commands += 1
        if plan.on != "all" and is_read != (plan.on == "reads"):
            return
        if plan.delay_ms and fate[0] < plan.delay:
            counts.delayed += 1
            command.delay_ns = plan.delay_ms * NS_PER_MS
        if fate[1] < plan.error:
            counts.failed += 1
            command.send_ns = NEVER_NS
            command.error = -errno.EIO
            command.status = STATUS_READ_ERROR if is_read else STATUS_WRITE_FAULT
            if not is_read and opcode not in (OPCODE_WRITE, OPCODE_WRITE_ZEROES):
                command.status = STATUS_INTERNAL_ERROR
            return
        if fate[2] < plan.drop:
            counts.dropped += 1
            command.lost_ns = now_ns + plan.drop_ms * NS_PER_MS
            command.error = -errno.ETIMEDOUT if is_read else -EUNCERTAIN
            if fate[3] < 0.5:
                command.send_ns = NEVER_NS
                return
        size_bytes = int(io["byte_count"][0])
        if opcode == OPCODE_READ and fate[4] < plan.corrupt:
            command.bit = int(fate[5] * size_bytes * 8)
        elif opcode == OPCODE_WRITE and fate[4] < plan.corrupt_write:
            counts.corrupted_writes += 1
            self._change_payload(command, int(fate[5] * size_bytes * 8))
        if plan.throttle_mib and size_bytes:
            command.send_ns = max(now_ns, drilled.free_ns)
            counts.throttled += command.send_ns > now_ns
            drilled.free_ns = command.send_ns + size_bytes * NS_PER_S // (plan.throttle_mib * MIB)

    @staticmethod
    def _change_payload(command: _Command, bit: int) -> None:
        """What is written is a copy: the payload is its owner's, and stays as it is."""
        io = command.io
        command.payload = aligned_buffer(int(io["byte_count"][0]))
        command.payload[:] = bytes_at(int(io["buf_addr"][0]), command.payload.nbytes)
        command.payload[bit // 8] ^= 1 << bit % 8
        io["buf_addr"] = address_of(command.payload)
        io["flags"] |= IO_MAY_COPY

    # ---- sending ----

    def _send_due(self, now_ns: int) -> None:
        due = [key for key in self._waiting if self._commands[key].send_ns <= now_ns]
        if not due:
            return
        room = self._base.capacity_count - self._base.outstanding_count
        sent = self._send(self._in_any_order(due[:room]))
        self._waiting = [key for key in self._waiting if key not in sent]

    def _in_any_order(self, keys: list[int]) -> list[int]:
        """Shuffled by each device's generator within its window; devices do not mind each other."""
        by_device: dict[int, list[int]] = {}
        for key in keys:
            by_device.setdefault(int(self._commands[key].io["device_index"][0]), []).append(key)
        found: list[int] = []
        for device_index, mine in by_device.items():
            drilled = self._devices[device_index]
            window = drilled.plan.reorder
            for start in range(0, len(mine), window) if window > 1 else ():
                part = mine[start : start + window]
                order = drilled.random.permutation(len(part)).tolist()
                drilled.counts.reordered += sum(index != at for at, index in enumerate(order))
                mine[start : start + window] = [part[index] for index in order]
            found += mine
        return found

    def _send(self, keys: Sequence[int]) -> set[int]:
        """Hand commands to the device's own queue; those that it took, or refused for good."""
        sent: set[int] = set()
        for key in keys:
            try:
                self._base.submit(self._commands[key].io)
            except QueueFullError:
                break
            except KvdevError:  # it does not take such a command: its owner gets to know as it would have
                self._commands[key].error, self._commands[key].status = -errno.EINVAL, 0
                heapq.heappush(self._ready, (0, key))
            sent.add(key)
        return sent

    # ---- completing ----

    def _receive(self, done: IoDoneArray) -> None:
        for entry in done:
            key = int(entry["tag"])
            command = self._commands[key]
            command.done = np.array([entry], dtype=IO_DONE_DTYPE)
            if command.lost_ns:
                due_ns = command.lost_ns
            else:
                command.error, command.status = int(entry["error"]), int(entry["status"])
                due_ns = int(entry["complete_ns"]) + command.delay_ns if command.delay_ns else 0
                self._flip(command)
            heapq.heappush(self._ready, (due_ns, key))

    def _flip(self, command: _Command) -> None:
        if command.bit < 0 or command.error:
            return
        io = command.io
        payload = bytes_at(int(io["buf_addr"][0]), int(io["byte_count"][0]))
        payload[command.bit // 8] ^= 1 << command.bit % 8
        self._devices[int(io["device_index"][0])].counts.corrupted += 1

    def poll(self, *, min_count: int, deadline: Deadline, max_count: int = POLL_COUNT_MAX) -> IoDoneArray:
        wanted = min(min_count, max_count)
        found: list[IoDoneArray] = [np.zeros(0, dtype=IO_DONE_DTYPE)]
        count = 0
        while True:
            now_ns = SYSTEM_CLOCK.monotonic_ns()
            self._send_due(now_ns)
            if self._base.outstanding_count:
                self._receive(self._base.poll(min_count=0, deadline=deadline))
            while self._ready and self._ready[0][0] <= now_ns and count < max_count:
                found.append(self._finish(heapq.heappop(self._ready)[1], now_ns))
                count += 1
            if count >= wanted or not self._commands or deadline.is_expired:
                return np.concatenate(found)
            self._wait(now_ns, deadline)

    def _wait(self, now_ns: int, deadline: Deadline) -> None:
        """Until something may be due, or the device has completed something."""
        due = [self._commands[key].send_ns for key in self._waiting]
        due += [self._ready[0][0]] if self._ready else []
        until_ns = min([deadline.expires_ns, *due])
        if self._base.outstanding_count:
            limit = Deadline(until_ns, started_ns=now_ns, clock=deadline.clock)
            self._receive(self._base.poll(min_count=1, deadline=limit))
        else:
            threading.Event().wait(max(until_ns - now_ns, 0) / NS_PER_S)

    def _finish(self, key: int, now_ns: int) -> IoDoneArray:
        """The completion of a command that its owner gets; nothing of it is left here."""
        command = self._commands.pop(key)
        done = np.zeros(1, dtype=IO_DONE_DTYPE) if command.done is None else command.done
        done["tag"] = command.tag
        done["submit_ns"] = command.submit_ns
        done["complete_ns"] = now_ns
        done["device_index"] = command.io["device_index"]
        done["error"] = command.error
        done["status"] = command.status
        if command.error == -EUNCERTAIN and not done["send_ns"][0]:
            done["send_ns"] = command.submit_ns  # 0 would say that it never left this host
        if command.group_addr:
            count_down_group(command.group_addr, command.submit_ns, now_ns, command.error, command.status)
        return done

    def abandon(self) -> None:
        """As ``IoQueue``: also what is held here completes at the next poll, and no payload is touched any more."""
        self._base.abandon()
        for key in self._waiting:
            self._commands[key].error, self._commands[key].status = -errno.ECANCELED, 0
        self._ready = [(0, key) for key in [*(key for _, key in self._ready), *self._waiting]]
        self._waiting.clear()
        for command in self._commands.values():
            command.delay_ns, command.bit = 0, -1
            command.lost_ns = min(command.lost_ns, 1)


def refuse_drill(devices: Iterable[BlockDevice], what: str, *, unless_honest: bool = False) -> None:
    """Raise UsageError where a drill could do harm: ``what`` is about to write on a device that has one.

    ``unless_honest``: only where reads may be wrong, so that ``what`` could act on them.
    """
    for device in devices:
        plan = device.drill
        if plan is None or plan.allows_damage or (unless_honest and not plan.misleads):
            continue
        why = "reads of it may be wrong" if unless_honest else "it may fail half way"
        raise UsageError(
            f"{device.uri}: {what}: expected a device without a drill, because {why}; "
            f"leave the drill out, or say drill-damage=allow where the content may be lost"
        )
