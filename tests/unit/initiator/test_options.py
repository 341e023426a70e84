"""Controller options refuse what cannot work, naming the option."""

from __future__ import annotations

from typing import Any

import pytest

from kvdev.clock import Deadline
from kvdev.errors import ConnectError, UsageError
from kvdev.initiator.options import ControllerOptions
from kvdev.initiator.resolve import resolve
from kvdev.uri import TcpAddress


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kato_ms", 0),
        ("kato_ms", 600_001),
        ("kato_ms", 1.5),
        ("kato_ms", True),
        ("io_queue_count", 0),
        ("io_queue_count", 17),
        ("queue_depth", 0),
        ("queue_depth", 4096),
        ("header_digest", "require"),
        ("data_digest", None),
        ("connect_timeout_s", 0),
        ("command_timeout_s", -1.0),
        ("admin_timeout_s", float("nan")),
        ("shutdown_timeout_s", float("inf")),
        ("shutdown_timeout_s", "5"),
        ("reconnect_delay_s", 0),
        ("reconnect_delay_s", -1),
        ("ctrl_loss_tmo_s", -2),
        ("ctrl_loss_tmo_s", True),
        ("ctrl_loss_tmo_s", 1),
        ("fast_io_fail_tmo_s", float("nan")),
        ("fast_io_fail_tmo_s", 601),
        ("fast_io_fail_tmo_s", 5),
        ("retry_count", 256),
        ("retry_count", -1),
        ("path_policy", "round_robin"),
        ("lost_writes", "retry"),
        ("fence_wait_s", -1),
        ("cqt_default_s", -1),
    ],
)
def test_options_when_out_of_range_then_error_names_them(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected"):
        ControllerOptions(**{name: value})


def test_options_when_default_then_as_documented() -> None:
    options = ControllerOptions()
    assert (options.kato_ms, options.io_queue_count, options.queue_depth) == (10_000, 1, 128)
    assert (options.reconnect_delay_s, options.ctrl_loss_tmo_s, options.fast_io_fail_tmo_s) == (10, 600, -1)
    assert options.retry_count == 5


@pytest.mark.parametrize(
    ("fast_io_fail", "ctrl_loss", "expected"),
    [(-1, 600, 600), (20, 600, 20), (-1, -1, None), (20, -1, 20), (0, 600, 0), (-1, 0, 0)],
)
def test_options_when_timeouts_then_commands_wait_for_the_sooner(
    fast_io_fail: float, ctrl_loss: float, expected: float | None
) -> None:
    options = ControllerOptions(fast_io_fail_tmo_s=fast_io_fail, ctrl_loss_tmo_s=ctrl_loss)
    assert options.fail_after_s == expected


def test_resolve_when_numeric_then_no_lookup() -> None:
    assert resolve(TcpAddress("127.0.0.1", 4420), deadline=Deadline.after(0)) == ["127.0.0.1"]
    assert resolve(TcpAddress("::1", 4420), deadline=Deadline.after(0)) == ["::1"]


def test_resolve_when_unknown_then_error_names_the_host() -> None:
    with pytest.raises(ConnectError, match="no-such-host"):
        resolve(TcpAddress("no-such-host.invalid", 4420), deadline=Deadline.after(20))
