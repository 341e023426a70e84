"""When lost writes may be sent again: the rule of Base 9.6.2 as arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from kvdev.clock import NS_PER_MS, NS_PER_S
from kvdev.initiator.fence import fence_ns

T = 1000 * NS_PER_S
RULE: dict[str, Any] = {
    "closed_ns": T,
    "keep_alive_sent_ns": T,
    "kato_ms": 5000,
    "is_traffic_based": False,
    "cqt_ms": 100,
    "cqt_default_s": 10.0,
}


@pytest.mark.parametrize(
    ("change", "wait_ms"),
    [
        ({}, 10_100),
        ({"keep_alive_sent_ns": T - 2 * NS_PER_S}, 8_100),
        # Noticed so late that the controller's own timer has run out before.
        ({"keep_alive_sent_ns": T - 60 * NS_PER_S}, 100),
        ({"cqt_ms": 0}, 20_000),
        ({"cqt_ms": 0, "cqt_default_s": 0.0}, 10_000),
        ({"is_traffic_based": True}, 15_100),
        # Any command may have started the timer, not only the last Keep Alive.
        ({"is_traffic_based": True, "keep_alive_sent_ns": T - 60 * NS_PER_S}, 15_100),
        ({"is_detected": True}, 100),
        ({"is_detected": True, "is_traffic_based": True}, 100),
        ({"wait_s": 0.25}, 250),
        ({"wait_s": 0}, 0),
    ],
)
def test_fence_when_circumstances_then_the_wait_of_the_rule(change: dict[str, Any], wait_ms: int) -> None:
    assert fence_ns(**{**RULE, **change}) == T + wait_ms * NS_PER_MS
