"""The provision file: what each mistake in it is answered with, and what a correct one means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdev.errors import UsageError
from kvdev_tools.provision.document import Deployment, build_deployment
from kvdev_tools.provision.schema import KEYWORDS, SCHEMA
from kvdev_tools.provision.source import load_file, load_text
from spdk_rpc.plan import FlushState, Id, Kind, flush_of_bdev
from spdk_rpc.plan.flush import verdict

ROOT = Path(__file__).resolve().parents[3]
NQN = "nqn.2026-01.io.kvdev:a"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"

SITE = f"""\
version: 1
name: site
targets:
  array0:
    rpc: /run/array0.sock
    keys: {{k0: /etc/kvdev/k0}}
    transport: {{max_io_size: 1MiB}}
    bdevs:
      m0: {{malloc: {{size: 64MiB}}}}
      m1: {{malloc: {{size: 64MiB}}}}
      a0: {{aio: {{file: /srv/a0.img}}, qos: {{rw_ios_per_sec: 5000}}}}
    raids:
      r0: {{strip_size: 64KiB, members: [m0, m1]}}
    lvstores:
      lvs0: {{bdev: a0, lvols: {{l0: {{size: 100MiB}}}}}}
    subsystems:
      {NQN}:
        serial_number: KV0
        hosts: [gpu0]
        listeners: ["192.0.2.7:4420", "192.0.2.8:4420"]
        namespaces: {{1: r0, 2: lvs0/l0}}
hosts:
  gpu0:
    rpc: /run/gpu0.sock
    nqn: {HOST_NQN}
    controllers:
      Nvme0: {{target: array0, subsystem: "{NQN}"}}
    raids:
      R0: {{strip_size: 128KiB, members: [Nvme0n1, Nvme0n2]}}
    engines:
      llama: {{volume: pool, geometry: llama3-8b, tensor_parallel: 8, quota_per_rank: 64GiB}}
volumes:
  pool:
    members: [{{target: array0, subsystem: "{NQN}"}}]
    durability: none
"""


def load(text: str) -> Deployment:
    return build_deployment(load_text(text, "site.yaml"))


def refused(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(text)
    return str(caught.value)


def test_a_site_means_one_vhost_controller_and_one_kv_namespace_per_rank() -> None:
    site = load(SITE)
    host = site.endpoint("gpu0")
    vhosts = [own.name for own in host.desired if own.kind is Kind.VHOST]
    assert vhosts == [f"llama.{rank}" for rank in range(8)]
    (engine,) = site.engines
    assert [rank.name for rank in engine.ranks] == vhosts
    heads = [(rank.geometry.kv_head_first, rank.geometry.kv_head_count) for rank in engine.ranks]
    assert heads == [(rank, 1) for rank in range(8)]
    assert {rank.geometry.kv_head_total for rank in engine.ranks} == {8}
    assert len({rank.geometry.fingerprint() for rank in engine.ranks}) == 8
    assert [member.uri for member in site.volumes["pool"].members] == [
        f"tcp://192.0.2.7:4420/{NQN}?nsid=1",
        f"tcp://192.0.2.7:4420/{NQN}?nsid=2",
    ]
    assert site.volumes["pool"].host_nqn == HOST_NQN


def test_flush_is_enabled_before_any_attach_and_paths_default_to_the_listeners() -> None:
    host = load(SITE).endpoint("gpu0")
    options = host.desired[Id(Kind.OPTIONS, "bdev_nvme")]
    assert options.attributes == {"enable_flush": True}
    controller = host.desired[Id(Kind.CONTROLLER, "Nvme0")]
    assert controller.attributes["paths"] == ("192.0.2.7:4420", "192.0.2.8:4420")
    assert controller.attributes["hostnqn"] == HOST_NQN
    assert controller.at_creation["multipath"] == "multipath"


def test_identities_are_the_same_every_time_and_differ_between_bdevs() -> None:
    def identities() -> list[Any]:
        state = load(SITE).endpoint("array0").desired
        return [each.at_creation["uuid"] for own, each in state.items() if own.kind in (Kind.BDEV, Kind.RAID)]

    assert identities() == identities()
    assert len(set(identities())) == len(identities()) == 4


def test_more_ranks_than_heads_hold_the_same_heads() -> None:
    site = load(SITE.replace("llama3-8b", "qwen2.5-7b"))
    heads = [rank.geometry.kv_head_first for rank in site.engines[0].ranks]
    assert heads == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_flush_is_told_for_what_is_not_there_yet() -> None:
    state = load(SITE).endpoint("array0").desired
    assert verdict(flush_of_bdev("r0", state, {})) is FlushState.NOT_NEEDED
    hops = flush_of_bdev("lvs0/l0", state, {})
    assert [hop.state for hop in hops] == [FlushState.SWALLOWED, FlushState.EFFECTIVE]
    host = load(SITE).endpoint("gpu0").desired
    assert verdict(flush_of_bdev("R0", host, {})) is FlushState.EFFECTIVE
    del host[Id(Kind.OPTIONS, "bdev_nvme")]
    assert verdict(flush_of_bdev("R0", host, {})) is FlushState.SWALLOWED


# Text to replace, its replacement, and what the error has to say. Places are line:column of the name at fault.
MISTAKES = {
    "no version": ("version: 1\n", "", "site.yaml:1:1: version: missing"),
    "another version": ("version: 1", "version: 2", "site.yaml:1:1: version: expected 1, got 2"),
    "unknown field": (
        "    rpc: /run/a",
        "    rcp: /run/a",
        "site.yaml:5:5: targets.array0.rcp: no such field",
    ),
    "a name twice": (
        "      m1: {malloc",
        "      m0: {malloc",
        "site.yaml:10:7: targets.array0.bdevs.m0: is there twice",
    ),
    "no size": (
        "{size: 64MiB}}\n      m1",
        "{size: much}}\n      m1",
        "site.yaml:9:21: targets.array0.bdevs.m0.malloc.size: ",
    ),
    "a list": (
        "rpc: /run/array0.sock",
        "rpc: [1]",
        "site.yaml:5:5: targets.array0.rpc: expected text, got a list",
    ),
    "yes": ("serial_number: KV0", "allow_any_host: yes", "expected true or false, got 'yes'"),
    "two drivers": (
        "m0: {malloc: {size: 64MiB}}",
        "m0: {malloc: {size: 1MiB}, null: {size: 1MiB}}",
        "expected one of malloc",
    ),
    "no driver": (
        "m0: {malloc: {size: 64MiB}}",
        "m0: {}",
        "site.yaml:9:7: targets.array0.bdevs.m0: expected one of",
    ),
    "odd size": (
        "m0: {malloc: {size: 64MiB}}",
        "m0: {malloc: {size: 1000}}",
        "expected a multiple of 4096, got 1000",
    ),
    "strip size": ("strip_size: 64KiB", "strip_size: 63KiB", "raids.r0.strip_size: expected a power of two"),
    "no such member": ("members: [m0, m1]", "members: [m0, mx]", "bdev mx: target array0 has no such bdev"),
    "a member twice": ("members: [m0, m1]", "members: [m0, m0]", "members: a member is there twice"),
    "claimed twice": ("namespaces: {1: r0,", "namespaces: {1: m0,", "bdev m0: is claimed by raid r0"),
    "a name of two": ("      r0: {strip", "      m0: {strip", "m0: is the name of bdev m0 already"),
    "block sizes": (
        "m1: {malloc: {size: 64MiB}}",
        "m1: {malloc: {size: 64MiB, block_size: 512}}",
        "site.yaml:13:7: targets.array0.raids.r0: members: expected equal block sizes, got m0 4096, m1 512",
    ),
    "a ring": ("members: [m0, m1]", "members: [m0, r0]", "raid r0: stands on itself"),
    "a file twice": (
        "m1: {malloc: {size: 64MiB}}",
        "m1: {aio: {file: /srv/a0.img}}",
        "file /srv/a0.img: is bdev m1's",
    ),
    "operations": ("rw_ios_per_sec: 5000", "rw_ios_per_sec: 5001", "expected a multiple of 1000, got 5001"),
    "no host": ("hosts: [gpu0]", "hosts: [gpu7]", "'gpu7': expected an NQN or an entry of hosts"),
    "no key": (
        "hosts: [gpu0]",
        "hosts: [{host: gpu0, psk: k9}]",
        "'k9': expected a name in keys of target array0",
    ),
    "host twice": ("hosts: [gpu0]", f"hosts: [gpu0, {HOST_NQN}]", "is there twice"),
    "listener twice": ("192.0.2.8:4420", "192.0.2.7:4420", "listeners[1]: 192.0.2.7:4420: is there twice"),
    "listener's name": (
        "192.0.2.8:4420",
        "array:4420",
        "expected a numeric address to listen on, got 'array'",
    ),
    "listener's port": ("192.0.2.8:4420", "192.0.2.8:70000", "port: expected 1 to 65535, got 70000"),
    "secure and open": (
        'hosts: [gpu0]\n        listeners: ["192.0.2.7:4420"',
        'allow_any_host: true\n        listeners: [{address: "192.0.2.7:4420", secure_channel: true}',
        "secure_channel: SPDK refuses it together with allow_any_host",
    ),
    "shut out": (
        "hosts: [gpu0]",
        f"hosts: [{HOST_NQN.replace('1111', '2222')}]",
        f"does not let {HOST_NQN} in",
    ),
    "same socket": (
        "/run/gpu0.sock",
        "/run/../run/array0.sock",
        "hosts.gpu0.rpc: /run/../run/array0.sock: is target array0's",
    ),
    "no target": (
        f'{{target: array0, subsystem: "{NQN}"}}\n    raids',
        f'{{target: array9, subsystem: "{NQN}"}}\n    raids',
        "target array9 serves no subsystem",
    ),
    "no namespace": (
        "members: [{target: array0,",
        "members: [{nsid: 9, target: array0,",
        "has no namespace 9",
    ),
    "no volume": ("volume: pool", "volume: lake", "'lake': expected an entry of volumes"),
    "no geometry": ("llama3-8b", "llama9", "geometry: preset: expected one of"),
    "ranks": (
        "tensor_parallel: 8",
        "tensor_parallel: 3",
        "expected a divisor or multiple of 8 KV heads, got 3",
    ),
    "small quota": ("quota_per_rank: 64GiB", "quota_per_rank: 1KiB", "expected at least one page"),
    "raid's strip": (
        "R0: {strip_size: 128KiB",
        "R0: {strip_size: 64KiB",
        "strip size: expected volume pool's 131072",
    ),
    "raid's order": (
        "[Nvme0n1, Nvme0n2]",
        "[Nvme0n2, Nvme0n1]",
        "its members or their order differ from those of volume pool",
    ),
    "member twice": (
        "durability: none",
        f'durability: none\n  lake:\n    members: [{{target: array0, subsystem: "{NQN}", nsid: 1}}]',
        "is a member of volume pool already",
    ),
    "nqn twice": (
        "hosts:\n  gpu0:\n",
        f'hosts:\n  gpu1: {{nqn: "{HOST_NQN}"}}\n  gpu0:\n',
        "is host gpu1's already",
    ),
    "strip of a volume": (
        "durability: none",
        "durability: none\n    strip_size: 8MiB",
        "strip_size: expected a power of two from 16 KiB to 4 MiB, got 8MiB",
    ),
    "a version that is no number": ("version: 1\n", "version: true\n", "version: expected 1, got true"),
    "tab": ("    rpc: /run/a", "\trpc: /run/a", "site.yaml:5:1: "),
    "merge": ("  array0:\n", "  array0:\n    <<: {rpc: /x}\n", "merge keys are not taken"),
    "tag": ("name: site", "name: !!python/name:os.system site", "no tags are taken"),
    "line feed in a name": ("name: site", 'name: "site\\n"', "name: expected a name of up to 64 letters"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_place(mistake: str) -> None:
    old, new, expected = MISTAKES[mistake]
    assert old in SITE
    text = refused(SITE.replace(old, new, 1))
    assert expected in text, text
    assert "\n" not in text


BARE = f"""\
version: 1
name: bare
targets:
  array0:
    rpc: /run/array0.sock
    bdevs:
      u0: {{malloc: {{size: 64MiB}}}}
      u1: {{malloc: {{size: 64MiB}}}}
    subsystems:
      {NQN}:
        hosts: [gpu0]
        listeners: ["192.0.2.7:4420"]
        namespaces: {{1: u0, 2: u1}}
hosts:
  gpu0:
    nqn: {HOST_NQN}
    engines:
      llama: {{volume: pool, geometry: small, quota_per_rank: 16MiB, tensor_parallel: 2}}
volumes:
  pool:
    members: [{{target: array0, subsystem: "{NQN}"}}]
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "u1: {malloc: {size: 64MiB}}",
            "u1: {malloc: {size: 64MiB, block_size: 512}}",
            "expected equal block sizes, got",
        ),
        (
            "u1: {malloc: {size: 64MiB}}",
            "u1: {malloc: {size: 4KiB}}",
            "nsid=2: expected at least 4 strips of 128 KiB",
        ),
        ("quota_per_rank: 16MiB", "quota_per_rank: 1TiB", "holds, 128 MiB, got 1 TiB for each of 2 ranks"),
        ("2: u1}", "33: u1}", "expected a namespace id up to max_namespaces 32, got 33"),
    ],
)
def test_a_volume_that_its_members_cannot_hold_is_told_from_the_file(
    old: str, new: str, expected: str
) -> None:
    load(BARE)
    assert old in BARE
    text = refused(BARE.replace(old, new, 1))
    assert expected in text, text


@pytest.mark.parametrize("size", range(0, len(SITE), 37))
def test_a_file_cut_anywhere_is_refused_or_complete(size: int) -> None:
    try:
        load(SITE[:size])
    except UsageError as error:
        assert str(error).startswith("site.yaml")


def test_hostile_files_end_with_one_line(tmp_path: Path) -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + at)}: &{chr(98 + at)} [{','.join(['*' + chr(97 + at)] * 9)}]\n" for at in range(9)
    )
    assert "expected at most" in refused(bomb)
    for deep in ("[" * 100_000, "{a: " * 100_000):
        assert "expected at most 32 levels" in refused(f"version: {deep}")
    assert "expected a mapping" in refused("only text")
    assert "empty file" in refused("# nothing")
    with pytest.raises(UsageError, match="expected UTF-8"):
        load_text(b"\xff\xfe")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="at most 1048576 bytes"):
        load_file(str(big))
    with pytest.raises(UsageError, match="No such file"):
        load_file(str(tmp_path / "none"))


def keywords_of(schema: Any, *, is_map: bool = False) -> set[str]:
    if isinstance(schema, list):
        return {key for each in schema for key in keywords_of(each)}
    if not isinstance(schema, dict):
        return set()
    found: set[str] = set() if is_map else set(schema)
    for key, each in schema.items():
        if is_map or key in ("items", "additionalProperties", "propertyNames", "anyOf"):
            found |= keywords_of(each)
        elif key == "properties":
            found |= keywords_of(each, is_map=True)
    return found


def test_the_check_knows_every_keyword_of_the_schema() -> None:
    assert keywords_of(SCHEMA) <= KEYWORDS


def test_the_shipped_schema_is_the_one_that_is_checked() -> None:
    shipped = json.loads((ROOT / "docs" / "provision.schema.json").read_text())
    assert shipped == json.loads(json.dumps(SCHEMA))


def properties_of(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for each in schema for name in properties_of(each)}
    if not isinstance(schema, dict):
        return set()
    found = set(schema.get("properties", {}))
    for key, each in schema.items():
        if key == "properties":
            found |= {name for value in each.values() for name in properties_of(value)}
        else:
            found |= properties_of(each)
    return found


def test_every_field_is_documented() -> None:
    text = (ROOT / "docs" / "provision.md").read_text()
    missing = {name for name in properties_of(SCHEMA) if f"`{name}`" not in text}
    assert not missing
