"""What goes wrong on a device on purpose, for a drill, and how it is written in the device's URI.

Not here: making it go wrong (``kvdev.block.drill``).
Trust: option texts are untrusted; raises only UsageError naming option, value and remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvdev.errors import UsageError

PREFIX = "drill-"
"""Of the options in a URI."""
SEED_MAX = 0xFFFF_FFFF
DELAY_MS_MAX = 60_000
"""Longer than any command's own time limit that makes sense; a drill's commands are held in memory."""
THROTTLE_MIB_MAX = 1 << 20
REORDER_COUNT_MAX = 4096
KINDS = ("all", "reads", "writes")

_CHANCE = re.compile(r"0|1|0?\.[0-9]{1,9}|1\.0{1,9}")
_NUMBER = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True)
class DrillPlan:
    """Faults of one device; each command draws from a generator seeded with ``seed``."""

    seed: int = 1
    on: str = "all"
    """``reads`` (compare and verify too), ``writes`` (everything that changes something, and flushes) or ``all``."""
    delay_ms: int = 0
    delay: float = 1.0
    """Chance that a command completes ``delay_ms`` late."""
    error: float = 0.0
    """Chance that a command fails with a media error, and never reaches the device."""
    drop: float = 0.0
    """Chance that a completion never comes, whether or not the command was carried out: one in two is."""
    drop_ms: int = 1000
    """When the owner of a dropped command is told that its fate is unknown."""
    corrupt: float = 0.0
    """Chance that one bit of what a read returns is another one; the device keeps what it has."""
    corrupt_write: float = 0.0
    """Chance that one bit of what is written is another one: that stays."""
    throttle_mib: int = 0
    """MiB a second at most; 0 for no limit."""
    reorder: int = 0
    """Commands that may be sent in any order; 0 and 1 keep it."""
    allows_damage: bool = False
    """Whether the drill may leave something wrong or lost behind."""

    def __post_init__(self) -> None:
        if self.on not in KINDS:
            raise UsageError(f"drill: on: expected {', '.join(KINDS)}, got {self.on!r}")
        if not (self.delay_ms or self.error or self.drop or self.reorder > 1 or self.throttle_mib) and not (
            self.corrupt or self.corrupt_write
        ):
            raise UsageError(
                "drill: expected at least one fault (delay-ms, error, drop, corrupt, corrupt-write, throttle-mib "
                "or reorder above 1), got none"
            )
        if self.corrupt_write and not self.allows_damage:
            raise UsageError(
                "drill: corrupt-write: what it changes stays on the device; only with damage=allow, on a device whose "
                "content may be lost"
            )

    @property
    def misleads(self) -> bool:
        """Whether what is read may be wrong, so that who acts on it may lose what was right."""
        return bool(self.corrupt)

    def options(self) -> list[str]:
        """As written in a URI, those that differ from the default."""
        found = []
        for name in _NAMES:
            value, usual = getattr(self, name), getattr(type(self), name)
            if value != usual:
                found.append(f"{PREFIX}{name.replace('_', '-')}={_text(value)}")
        return [*found, f"{PREFIX}damage=allow"] if self.allows_damage else found

    def __str__(self) -> str:
        faults = [each[len(PREFIX) :] for each in self.options() if not each.startswith(f"{PREFIX}seed=")]
        return ", ".join([*faults, f"seed={self.seed}"])


_NAMES = (
    "seed",
    "on",
    "delay_ms",
    "delay",
    "error",
    "drop",
    "drop_ms",
    "corrupt",
    "corrupt_write",
    "throttle_mib",
    "reorder",
)
_LIMITS = {
    "seed": (0, SEED_MAX),
    "delay_ms": (1, DELAY_MS_MAX),
    "drop_ms": (1, DELAY_MS_MAX),
    "throttle_mib": (1, THROTTLE_MIB_MAX),
    "reorder": (2, REORDER_COUNT_MAX),
}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".")
    return str(value)


def parse_plan(options: Mapping[str, str], *, where: str) -> DrillPlan:
    """A plan from options without their prefix, as texts; ``where`` is what they were written in."""
    given: dict[str, object] = {}
    for option, text in options.items():
        name = option.replace("-", "_")
        if option == "damage":
            if text != "allow":
                raise UsageError(f"drill: damage: expected allow, got {text!r} in {where!r}")
            given["allows_damage"] = True
        elif "_" in option or name not in _NAMES:
            names = ", ".join(each.replace("_", "-") for each in _NAMES)
            raise UsageError(f"drill: option {option!r}: expected {names} or damage in {where!r}")
        elif name == "on":
            given[name] = text
        elif name in _LIMITS:
            low, high = _LIMITS[name]
            if not _NUMBER.fullmatch(text) or not low <= int(text) <= high:
                raise UsageError(f"drill: {option}: expected {low} to {high}, got {text!r} in {where!r}")
            given[name] = int(text)
        else:
            if not _CHANCE.fullmatch(text):
                raise UsageError(
                    f"drill: {option}: expected a chance from 0 to 1 such as 0.01, got {text!r} in {where!r}"
                )
            given[name] = float(text)
    return DrillPlan(**given)  # type: ignore[arg-type]
