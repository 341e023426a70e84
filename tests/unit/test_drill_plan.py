"""Drills as people type them: every option, every refusal, the round trip."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.drill import DELAY_MS_MAX, KINDS, REORDER_COUNT_MAX, SEED_MAX, THROTTLE_MIB_MAX, DrillPlan
from kvdev.errors import UsageError
from kvdev.uri import (
    FileUri,
    MemUri,
    TcpAddress,
    TcpUri,
    VhostUri,
    VolumeUri,
    parse_device_uri,
    parse_discovery_uri,
    parse_subsystem_uri,
    parse_uri,
    parse_volume_uri,
)

NQN = "nqn.2024-01.io.example:kv"


def test_every_option_when_given_then_in_the_plan() -> None:
    text = (
        "drill+file:/srv/kv?engine=threads&drill-seed=7&drill-on=reads&drill-delay-ms=5&drill-delay=0.25&"
        "drill-error=0.001&drill-drop=.5&drill-drop-ms=90&drill-corrupt=1&drill-corrupt-write=0.1&"
        "drill-throttle-mib=10&drill-reorder=4&drill-damage=allow"
    )
    plan = DrillPlan(7, "reads", 5, 0.25, 0.001, 0.5, 90, 1.0, 0.1, 10, 4, True)
    assert parse_device_uri(text) == FileUri("/srv/kv", engine="threads", drill=plan)


def test_each_kind_of_device_when_it_has_a_drill_then_kept() -> None:
    plan = DrillPlan(error=0.5)
    for text, uri in [
        (
            f"drill+tcp://192.0.2.1:4420/{NQN}?nsid=1&drill-error=0.5",
            TcpUri((TcpAddress("192.0.2.1", 4420),), NQN, 1),
        ),
        ("drill+vhost:/run/a?drill-error=0.5", VhostUri("/run/a")),
        ("drill+mem:a?drill-error=0.5", MemUri("a")),
    ]:
        parsed = parse_device_uri(text)
        assert parsed.drill == plan
        assert type(parsed) is type(uri) and str(parsed) == text


def test_volumes_when_members_have_drills_then_kept() -> None:
    members = parse_volume_uri("vol:file:/a,drill+file:/b?drill-error=1").members
    assert [member.drill is not None for member in members] == [False, True]
    text = f"vol+drill+tcp://192.0.2.1:4420/{NQN}?drill-drop=0.1"
    volume = parse_uri(text)
    assert isinstance(volume, VolumeUri) and volume.subsystem is not None
    assert volume.subsystem.drill == DrillPlan(drop=0.1) and str(volume) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("drill+file:/a", ["at least one fault"]),
        ("drill+file:/a?drill-seed=3", ["at least one fault"]),
        ("drill+file:/a?drill-error=0", ["at least one fault"]),
        ("file:/a?drill-error=0.1", ["drill-error", "drill+"]),
        ("drill+drill+file:/a?drill-error=0.1", ["once"]),
        ("drill+file:/a?drill-error=0.1&drill-error=0.2", ["twice"]),
        ("drill+file:/a?drill-error=", ["NAME=VALUE"]),
        ("drill+file:/a?drill-eror=0.1", ["'eror'", "corrupt-write"]),
        ("drill+file:/a?drill-drop_ms=4", ["'drop_ms'"]),
        ("drill+file:/a?drill-error=1.5", ["chance from 0 to 1", "1.5"]),
        ("drill+file:/a?drill-error=-0.5", ["chance", "-0.5"]),
        ("drill+file:/a?drill-error=1e-3", ["chance", "1e-3"]),
        ("drill+file:/a?drill-delay-ms=0", ["1 to 60000", "'0'"]),
        (f"drill+file:/a?drill-delay-ms={DELAY_MS_MAX + 1}", ["1 to 60000"]),
        (f"drill+file:/a?drill-reorder={REORDER_COUNT_MAX + 1}", ["2 to 4096"]),
        ("drill+file:/a?drill-error=0.1&drill-seed=x", ["seed", "'x'"]),
        ("drill+file:/a?drill-error=0.1&drill-on=write", ["all, reads, writes", "'write'"]),
        ("drill+file:/a?drill-corrupt-write=0.1", ["corrupt-write", "damage=allow"]),
        ("drill+file:/a?drill-error=0.1&drill-damage=yes", ["expected allow", "'yes'"]),
        ("vol:drill+file:/a?drill-error=0.1,file:/a", ["named twice"]),
        (
            f"vol:drill+tcp://192.0.2.1/{NQN}?nsid=1&drill-error=0.1,tcp://192.0.2.1/{NQN}?nsid=1",
            ["named twice"],
        ),
        ("vol+drill+file:/a?drill-error=0.1", ["vol+tcp"]),
    ],
)
def test_uri_when_its_drill_is_wrong_then_the_error_names_it(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text)
    for part in parts:
        assert part in str(caught.value)


def test_subsystem_when_it_has_a_drill_then_refused() -> None:
    text = f"drill+tcp://192.0.2.1/{NQN}?drill-error=0.1"
    with pytest.raises(UsageError, match="a drill is for reads and writes"):
        parse_subsystem_uri(text)
    with pytest.raises(UsageError):
        parse_discovery_uri(text)


CHANCES = st.integers(0, 10**9).map(lambda number: number / 10**9)


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, SEED_MAX),
            "on": st.sampled_from(KINDS),
            "delay_ms": st.integers(0, DELAY_MS_MAX),
            "drop_ms": st.integers(1, DELAY_MS_MAX),
            "throttle_mib": st.integers(0, THROTTLE_MIB_MAX),
            "reorder": st.sampled_from([0, 2, 7, REORDER_COUNT_MAX]),
            "delay": CHANCES,
            "error": CHANCES,
            "drop": CHANCES,
            "corrupt": CHANCES,
            "corrupt_write": CHANCES,
        }
    )
)
def test_plan_when_written_and_parsed_then_the_same(options: dict[str, Any]) -> None:
    options["allows_damage"] = options["corrupt_write"] > 0
    try:
        plan = DrillPlan(**options)
    except UsageError:
        return
    uri = MemUri("a", 4096, drill=plan)
    assert parse_device_uri(str(uri)) == uri
