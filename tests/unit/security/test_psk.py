"""TLS keys: the printed form, the identities and keys that others derive, and what is malformed."""

from __future__ import annotations

import base64
import zlib

import pytest

from kvdev.errors import UsageError
from kvdev.security.psk import TlsPsk, derive

KEY32 = bytes.fromhex("5512dbb6737d0106f65975b773dfb011ffc344bcf442e2dd6d8bc4870b5d5b03")
KEY48 = KEY32 + bytes.fromhex("ffc344bcf442e2dd6d8bc4870b5d5b03")
HOST, SUB = "nqn.psk-test-host", "nqn.psk-test-subsys"
# TCP Transport 1.0, 3.6.1.5 has the first; the others and the identities are what nvme-cli prints.
PRINTED = {
    (KEY32, 0): "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
    (KEY32, 1): "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
    (KEY48, 2): "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
}


@pytest.mark.parametrize(("key", "transform"), list(PRINTED))
def test_printed_form_is_that_of_others(key: bytes, transform: int) -> None:
    psk = TlsPsk(key, transform)
    assert psk.text() == PRINTED[key, transform]
    assert TlsPsk.parse(psk.text() + "\n", where="file") == psk


@pytest.mark.parametrize(
    ("key", "transform", "identity"),
    [
        (KEY32, 1, f"NVMe1R01 {HOST} {SUB} iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU="),
        (KEY48, 2, f"NVMe1R02 {HOST} {SUB} QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a"),
    ],
)
def test_identity_is_that_of_others(key: bytes, transform: int, identity: str) -> None:
    made = TlsPsk(key, transform).material(host_nqn=HOST, subnqn=SUB, version=1)
    assert (made.identity, made.suite, len(made.psk)) == (identity, transform, len(key))
    old = TlsPsk(key, transform).material(host_nqn=HOST, subnqn=SUB, version=0)
    assert old.identity == f"NVMe0R{transform:02d} {HOST} {SUB}"
    assert old.psk != made.psk


# What Linux derives: retained key, digest in the identity, key of TLS.
LINUX = {
    1: (
        "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a",
        "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
        "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
    ),
    2: (
        "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e118749001ce4bbe8640b9e3a748cb11ce4b1d71d359cce39",
        "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
        "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d80939d0898fff15bb8b77119d2be0aac423e7590",
    ),
}


@pytest.mark.parametrize("suite", [1, 2])
def test_key_of_tls_is_that_of_linux(suite: int) -> None:
    retained, digest, psk = LINUX[suite]
    made = derive(bytes.fromhex(retained), suite=suite, host_nqn="hostnqn", subnqn="subsysnqn", version=1)
    assert made.identity == f"NVMe1R{suite:02d} hostnqn subsysnqn {digest}"
    assert made.psk.hex() == psk


def printed(key: bytes, transform: str) -> str:
    return (
        f"NVMeTLSkey-1:{transform}:{base64.b64encode(key + zlib.crc32(key).to_bytes(4, 'little')).decode()}:"
    )


GOOD = PRINTED[KEY32, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "NVMeTLSkey-1:hh:BASE64:"),
        (GOOD[:-1], "NVMeTLSkey-1:hh:BASE64:"),
        (GOOD + "x", "NVMeTLSkey-1:hh:BASE64:"),
        (GOOD.replace("-1:", "-2:"), "NVMeTLSkey-1:hh:BASE64:"),
        (GOOD.replace(":01:", ":03:"), "00, 01 or 02"),
        (GOOD.replace("VRLb", "V*Lb"), "base64"),
        (printed(KEY32, "02"), "48 with 02"),
        (printed(KEY48, "01"), "32 bytes with hash 01"),
        (printed(b"x" * 31, "00"), "32 or 48 bytes"),
        (GOOD.replace("VRLb", "VRLc"), "checksum"),
    ],
)
def test_parse_when_malformed_then_error_says_how_and_has_nothing_of_it(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        TlsPsk.parse(text, where="tls-psk: file:/k")
    assert str(caught.value).startswith("tls-psk: file:/k: ") and expected in str(caught.value)
    assert "btnN9AQb2" not in str(caught.value)


def test_generate_then_parse_gives_the_same_key_and_repr_has_none_of_it() -> None:
    for transform, size in ((0, 32), (1, 32), (2, 48)):
        made = TlsPsk.generate(transform=transform)
        assert TlsPsk.parse(made.text(), where="file") == made
        assert repr(made) == f"TlsPsk({size} bytes, transform {transform:02d})"
        assert made.material(host_nqn=HOST, subnqn=SUB, version=1).psk.hex() not in repr(
            made.material(host_nqn=HOST, subnqn=SUB, version=1)
        )


def test_identity_of_version_0_has_a_limit() -> None:
    long = "nqn.2024-01.io.example:" + "x" * 200
    psk = TlsPsk(KEY32, 1)
    assert len(psk.material(host_nqn=long, subnqn=long, version=1).identity) > 255
    with pytest.raises(UsageError, match="too long"):
        psk.material(host_nqn=long, subnqn=long, version=0)
