"""Every method of SPDK's table is answered, or refused by name with the reason that docs/rpc.md gives."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from kvdev.target.model import SpdkError, TargetModel
from kvdev.target.rpc_absent import ABSENT
from kvdev.target.rpc_methods import STARTUP_ONLY_METHODS, RpcMethods
from kvdev.target.serve import EmbeddedTarget
from kvdev.testing.target_backend import MemoryBackend
from spdk_rpc import Client, RpcUnsupportedError, table
from spdk_rpc.plan import resource

DOC = Path(__file__).resolve().parents[3] / "docs" / "rpc.md"


def own_methods() -> set[str]:
    return {*RpcMethods(TargetModel(MemoryBackend())).names(), *STARTUP_ONLY_METHODS}


def test_what_is_not_there_has_a_reason() -> None:
    own = own_methods()
    assert not own & set(ABSENT)
    assert set(table.methods()) - own - set(ABSENT) == set()


def test_the_documented_list_is_the_list() -> None:
    section = DOC.read_text().partition("### Methods that it has not")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (`[^|]+`) \|$", section, re.M)
    documented = {name: reason for reason, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert documented == dict(ABSENT)


@pytest.mark.parametrize("method", sorted(ABSENT))
def test_a_refusal_gives_the_reason(method: str) -> None:
    with pytest.raises(SpdkError) as caught:
        asyncio.run(RpcMethods(TargetModel(MemoryBackend())).call(method, None))
    assert (caught.value.code, caught.value.message) == (-32601, f"Method not found: {ABSENT[method]}")


def test_the_client_passes_the_reason_on(tmp_path: Path) -> None:
    with (
        EmbeddedTarget(tmp_path / "rpc.sock", backend=MemoryBackend()) as target,
        Client(target.rpc_socket) as client,
        pytest.raises(RpcUnsupportedError, match=r"has no such method \(-32601\): lvols are mappings"),
    ):
        client.call("bdev_lvol_set_parent", {"lvol_name": "a", "parent_name": "b"})


def test_provisioning_calls_nothing_that_is_not_there() -> None:
    """By the source: every method that a kind of resource is made, changed or removed with."""
    source = Path(str(resource.__file__)).read_text()
    called = set(re.findall(r'"((?:bdev|nvmf|vhost|keyring)_\w+)"', source)) & set(table.methods())
    called |= {
        f"bdev_{driver}_{verb}"
        for driver in ("malloc", "null", "aio", "uring")
        for verb in ("create", "delete")
    }
    assert len(called) > 20 and len(resource._KINDS) == 14
    assert called <= own_methods()
