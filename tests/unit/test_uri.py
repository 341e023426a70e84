"""Device, volume and KV namespace names: every form, every refusal, the round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdev.errors import UsageError
from kvdev.uri import (
    DISCOVERY_NQN,
    FILE_DEPTH_MAX,
    FILE_DIRECT,
    FILE_ENGINES,
    DeviceUri,
    DigestPolicy,
    FileUri,
    KeySource,
    KvNamespaceUri,
    MemUri,
    TcpAddress,
    TcpUri,
    Uri,
    VhostUri,
    VolumeUri,
    check_nqn,
    parse_address,
    parse_device_uri,
    parse_discovery_uri,
    parse_kv_namespace_uri,
    parse_subsystem_uri,
    parse_uri,
    parse_volume_uri,
)

NQN = "nqn.2024-01.io.example:kv"
UUID_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
A = TcpAddress("192.0.2.1", 4420)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        (f"tcp://192.0.2.1:4420/{NQN}?nsid=3", TcpUri((A,), NQN, 3)),
        (f"tcp://192.0.2.1/{NQN}", TcpUri((A,), NQN)),
        (f"tcp://[2001:db8::1]:4421/{NQN}", TcpUri((TcpAddress("2001:db8::1", 4421),), NQN)),
        (f"tcp://[fe80::1%25eth0]/{NQN}", TcpUri((TcpAddress("fe80::1%eth0", 4420),), NQN)),
        (
            f"tcp://array-1.example.com:1/{UUID_NQN}",
            TcpUri((TcpAddress("array-1.example.com", 1),), UUID_NQN),
        ),
        (f"tcp://192.0.2.1/{DISCOVERY_NQN}", TcpUri((TcpAddress("192.0.2.1", 8009),), DISCOVERY_NQN)),
        (
            f"tcp://192.0.2.1:4420/{NQN}?nsid=1&hdgst=require&ddgst=prefer"
            "&dhchap-key=file:/etc/a%2Cb&dhchap-ctrl-key=keyring:kvdev%3Ac&path=192.0.2.2:4420",
            TcpUri(
                (A, TcpAddress("192.0.2.2", 4420)),
                NQN,
                1,
                DigestPolicy.REQUIRE,
                DigestPolicy.PREFER,
                KeySource("file", "/etc/a,b"),
                KeySource("keyring", "kvdev:c"),
            ),
        ),
        ("file:/dev/nvme0n1", FileUri("/dev/nvme0n1")),
        ("file:///var/tmp/a%2Cb", FileUri("/var/tmp/a,b")),
        (
            "file:/a?engine=threads&direct=off&depth=4096&poll=on",
            FileUri("/a", engine="threads", direct="off", depth=4096, is_polled=True),
        ),
        (
            "vol:file:/a?depth=1,file:/b?poll=off",
            VolumeUri((FileUri("/a", depth=1), FileUri("/b", is_polled=False))),
        ),
        ("vhost:/run/spdk/vhost.0", VhostUri("/run/spdk/vhost.0")),
        ("mem:a", MemUri("a")),
        ("mem:a?size=64MiB", MemUri("a", 64 << 20)),
        ("vol:file:/a,mem:b", VolumeUri((FileUri("/a"), MemUri("b")))),
        (f"vol+tcp://192.0.2.1:4420/{NQN}", VolumeUri(subsystem=TcpUri((A,), NQN))),
        (
            f"vol+tcp://192.0.2.1:4420/{NQN}#llama",
            KvNamespaceUri(VolumeUri(subsystem=TcpUri((A,), NQN)), "llama"),
        ),
        ("vol:mem:a#x", KvNamespaceUri(VolumeUri((MemUri("a"),)), "x")),
    ],
)
def test_parse_uri_when_well_formed_then_value_and_round_trip(text: str, uri: Uri) -> None:
    assert parse_uri(text) == uri
    assert parse_uri(str(uri)) == uri


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "uri: expected tcp://"),
        ("nonsense", "uri: expected tcp://"),
        ("ftp:/x", "scheme 'ftp'"),
        ("rdma://1.2.3.4/x", "scheme 'rdma'"),
        (f"tcp:192.0.2.1/{NQN}", "tcp://HOST:PORT/NQN"),
        ("tcp://192.0.2.1:4420", "subsystem NQN"),
        ("tcp://192.0.2.1:4420/", "subsystem NQN"),
        ("tcp://192.0.2.1:4420/notannqn", "subsystem NQN"),
        (f"tcp:///{NQN}", "address: host"),
        (f"tcp://192.0.2.256/{NQN}", "IPv4"),
        (f"tcp://1.2.3/{NQN}", "IPv4"),
        (f"tcp://192.0.2.1:/{NQN}", "port: expected 1 to 65535, got ''"),
        (f"tcp://192.0.2.1:0/{NQN}", "port: expected 1 to 65535"),
        (f"tcp://192.0.2.1:65536/{NQN}", "port: expected 1 to 65535"),
        (f"tcp://192.0.2.1:+1/{NQN}", "port: expected 1 to 65535"),
        (f"tcp://192.0.2.1:\u0664/{NQN}", "port: expected 1 to 65535"),
        (f"tcp://::1/{NQN}", "in brackets"),
        (f"tcp://[::1/{NQN}", r"[IPV6]:PORT"),
        (f"tcp://[::1]x/{NQN}", r"[IPV6]:PORT"),
        (f"tcp://[192.0.2.1]/{NQN}", "IPv6 address in the brackets"),
        (f"tcp://a b/{NQN}", "host: expected"),
        (f"tcp://-a/{NQN}", "host: expected"),
        (f"tcp://{'a' * 254}/{NQN}", "host: expected"),
        (f"tcp://h/{NQN}?nsid=0", "nsid: expected 1 to 4294967294"),
        (f"tcp://h/{NQN}?nsid=4294967295", "nsid: expected 1 to 4294967294"),
        (f"tcp://h/{NQN}?nsid=-1", "nsid"),
        (f"tcp://h/{NQN}?nsid=1&nsid=1", "'nsid' is given twice"),
        (f"tcp://h/{NQN}?nsid", "NAME=VALUE"),
        (f"tcp://h/{NQN}?nsid=", "NAME=VALUE"),
        (f"tcp://h/{NQN}?hdgst=yes", "hdgst: expected require, prefer or off, got 'yes'"),
        (f"tcp://h/{NQN}?ddgst=on", "ddgst: expected require, prefer or off"),
        (f"tcp://h/{NQN}?key=a", "option 'key'"),
        (f"tcp://h/{NQN}?dhchap-key=a", "dhchap-key: expected file:/PATH or keyring:NAME, got 'a'"),
        (f"tcp://h/{NQN}?dhchap-key=file:a", "dhchap-key: file: expected an absolute path"),
        (f"tcp://h/{NQN}?dhchap-ctrl-key=keyring:", "dhchap-ctrl-key: keyring: expected 1 to"),
        (f"tcp://h/{NQN}?dhchap-key=keyring:%0a", "printable"),
        (f"tcp://h/{NQN}?dhchap-key=DHHC-1:00:QUFB:", "got the secret itself"),
        (f"tcp://h/{NQN}?path=h", "named twice"),
        (f"tcp://h/{NQN}?path=h:x", "path: port"),
        (f"tcp://h/{NQN}?size=1", "option 'size'"),
        (f"tcp://h/{NQN}?" + "&".join(f"path=h:{port}" for port in range(1, 17)), "at most 16 paths"),
        (f"tcp://h/{NQN}%2", "two hex digits"),
        (f"tcp://h/{NQN}%ff", "UTF-8"),
        (f"tcp://h/{NQN}#kv", "VOLUME#NAME"),
        ("file:", "absolute path"),
        ("file:relative", "absolute path"),
        ("file:/", "absolute path"),
        ("file:/a?size=1", "expected engine, direct, depth or poll"),
        ("file:/a?engine=aio", "engine: expected auto, io_uring, threads, got 'aio'"),
        ("file:/a?direct=yes", "direct: expected auto, on, off, got 'yes'"),
        ("file:/a?depth=0", "depth: expected 1 to 4096, got '0'"),
        ("file:/a?depth=4097", "depth: expected 1 to 4096, got '4097'"),
        ("file:/a?depth=x", "depth: expected 1 to 4096, got 'x'"),
        ("file:/a?poll=1", "poll: expected on, off, got '1'"),
        ("file:/a?depth=1&depth=2", "depth: is given twice"),
        ("file:/a?depth", "expected NAME=VALUE"),
        ("vhost:/a?size=1", "no options"),
        ("vol:file:/a,file:/a?depth=2", "member 1: file:/a?depth=2 is named twice"),
        ("vhost:sock", "absolute path"),
        ("mem:", "memory device name"),
        ("mem:a?size=0", "size: expected more than 0"),
        ("mem:a?size=1.5B", "whole number"),
        ("mem:a?size=big", "size: expected a size"),
        ("mem:a?size=1&size=1", "given twice"),
        ("mem:a?bs=512", "option 'bs'"),
        ("vol:", "at least one device"),
        ("vol:mem:a,", "member 1: expected a device, got nothing"),
        ("vol:mem:a,mem:a", "member 1: mem:a is named twice"),
        ("vol:vol:mem:a", "got a volume"),
        (f"vol:tcp://h/{NQN}", r"append ?nsid=N"),
        ("vol:" + ",".join(f"mem:{index}" for index in range(257)), "at most 256 devices"),
        ("vol+file:/a", "vol+tcp://"),
        (f"vol+tcp://h/{NQN}?nsid=1", "all labelled namespaces"),
        ("vol:mem:a#", "namespace name"),
        ("vol:mem:a#" + "n" * 224, "at most 223 bytes"),
        ("vol:mem:a#\n", "printable"),
        ("m" * 70000, "at most 65536 characters"),
    ],
)
def test_parse_uri_when_wrong_then_error_names_the_field(text: str, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "nqn",
    [
        DISCOVERY_NQN,
        UUID_NQN,
        NQN,
        "nqn.2016-06.io.spdk:cnode1",
        "nqn.2024-01.lab:nvmet",
        "nqn.1988-11.com.dell:powerstore:00:abc/def",
        "nqn.2024-12.a:" + "x" * 209,
    ],
)
def test_check_nqn_when_valid_then_returned(nqn: str) -> None:
    assert check_nqn(nqn, field="nqn") == nqn


@pytest.mark.parametrize(
    "nqn",
    [
        "",
        "nqn",
        "iqn.2024-01.io.example:kv",
        "nqn.2024-00.io.example:kv",
        "nqn.2024-13.io.example:kv",
        "nqn.24-01.io.example:kv",
        "nqn.2024-01.io.example",
        "nqn.2024-01.io.example:",
        "nqn.2024-01.:kv",
        "nqn.2024-01.io..example:kv",
        "nqn.2024-01.-io:kv",
        "nqn.2024-01.io.example:k\x00v",
        "nqn.2024-01.io.example:k\nv",
        "nqn.2014-08.org.nvmexpress:uuid:1111",
        UUID_NQN + "0",
        "nqn.2024-12.a:" + "x" * 210,
        "nqn.2024-12.a:\ud800",
    ],
)
def test_check_nqn_when_invalid_then_usage_error_names_field(nqn: str) -> None:
    with pytest.raises(UsageError, match=r"^subsystem NQN: expected"):
        check_nqn(nqn, field="subsystem NQN")


def test_parse_address_when_no_port_and_no_default_then_remedy() -> None:
    with pytest.raises(UsageError, match="append the port"):
        parse_address("h", port=None)


def test_parse_discovery_uri_when_short_then_defaults() -> None:
    expected = TcpUri((TcpAddress("h", 8009),), DISCOVERY_NQN)
    assert parse_discovery_uri("h") == expected
    assert parse_discovery_uri("tcp://h") == expected
    assert parse_discovery_uri(f"tcp://h:8009/{DISCOVERY_NQN}") == expected
    assert parse_discovery_uri("[::1]:4420").address == TcpAddress("::1", 4420)
    assert parse_discovery_uri("h?hdgst=require").header_digest is DigestPolicy.REQUIRE
    with pytest.raises(UsageError, match="port"):
        parse_discovery_uri("h:0")


def test_narrow_parsers_when_other_kind_then_refused() -> None:
    assert parse_volume_uri("mem:a") == VolumeUri((MemUri("a"),))
    for parse, text in (
        (parse_device_uri, "vol:mem:a"),
        (parse_volume_uri, "vol:mem:a#x"),
        (parse_kv_namespace_uri, "vol:mem:a"),
        (parse_subsystem_uri, "mem:a"),
    ):
        with pytest.raises(UsageError, match=r"uri: expected (a|one device)"):
            parse(text)


_PRINTABLE = st.characters(min_codepoint=32, max_codepoint=0x2FFF).filter(str.isprintable)
_NAMES = st.text(_PRINTABLE, min_size=1, max_size=20)
_HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z][a-z0-9]{0,10}(\.[a-z][a-z0-9]{0,10}){0,3}", fullmatch=True),
)
_ADDRESSES = st.builds(TcpAddress, _HOSTS, st.integers(1, 65535))
_NQNS = st.one_of(
    st.just(DISCOVERY_NQN), st.just(UUID_NQN), _NAMES.map(lambda name: f"nqn.2024-01.io.example:{name}")
)
_POLICIES = st.none() | st.sampled_from(DigestPolicy)


_PATHS = _NAMES.map(lambda name: "/" + name.lstrip("/")).filter(lambda path: path != "/")
_SOURCES = st.one_of(
    st.none(),
    st.builds(KeySource, st.just("file"), _PATHS.filter(str.isprintable)),
    st.builds(KeySource, st.just("keyring"), _NAMES.filter(str.isprintable)),
)


def _tcp(nsids: st.SearchStrategy[int | None]) -> st.SearchStrategy[TcpUri]:
    return st.builds(
        TcpUri,
        st.lists(_ADDRESSES, min_size=1, max_size=4, unique=True).map(tuple),
        _NQNS,
        nsids,
        _POLICIES,
        _POLICIES,
        _SOURCES,
        _SOURCES,
    )


_OTHERS = st.one_of(
    st.builds(
        FileUri,
        _PATHS,
        st.none() | st.sampled_from(FILE_ENGINES),
        st.none() | st.sampled_from(FILE_DIRECT),
        st.none() | st.integers(1, FILE_DEPTH_MAX),
        st.none() | st.booleans(),
    ),
    st.builds(VhostUri, _PATHS),
    st.builds(MemUri, _NAMES, st.none() | st.integers(1, (1 << 63) - 1)),
)


def _place(uri: DeviceUri) -> object:
    """A file is the same member whatever its options."""
    return uri.path if isinstance(uri, FileUri) else uri


_VOLUMES = st.one_of(
    st.builds(
        VolumeUri,
        st.lists(_tcp(st.integers(1, 0xFFFFFFFE)) | _OTHERS, min_size=1, max_size=4, unique_by=_place).map(
            tuple
        ),
    ),
    st.builds(VolumeUri, st.just(()), _tcp(st.none())),
)


@given(
    st.one_of(
        _tcp(st.none() | st.integers(1, 0xFFFFFFFE)),
        _OTHERS,
        _VOLUMES,
        st.builds(KvNamespaceUri, _VOLUMES, _NAMES),
    )
)
def test_uri_when_printed_then_parses_to_the_same(uri: Uri) -> None:
    assert parse_uri(str(uri)) == uri


@given(
    st.text(max_size=80) | st.from_regex(r"(tcp://|vol:|vol\+tcp://|mem:|file:)[ -~]{0,60}", fullmatch=True)
)
def test_parse_uri_when_any_text_then_value_or_usage_error(text: str) -> None:
    try:
        uri = parse_uri(text)
    except UsageError:
        return
    assert parse_uri(str(uri)) == uri


@pytest.mark.parametrize(
    "text",
    [
        "DHHC-1:00:c2VjcmV0:",
        f"tcp://h/{NQN}?nope=1&dhchap-key=DHHC-1:00:c2VjcmV0:",
        f"tcp://h/{NQN}?dhchap-key=file:/dhhc-1:00:c2VjcmV0:",
        f"tcp://h/{NQN}?dhchap-key=NVMeTLSkey-1:01:c2VjcmV0:",
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="got the secret itself") as caught:
        parse_uri(text)
    assert "c2VjcmV0" not in str(caught.value)
