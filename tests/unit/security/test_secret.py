"""Secrets in their printed form, keys made of them, and the files and keyrings they are kept in."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import os
import platform
import zlib
from pathlib import Path

import pytest

from kvdev.errors import UnsupportedError, UsageError
from kvdev.security.keyring import read_keyring
from kvdev.security.secret import DhchapSecret
from kvdev.security.source import read_key_file, read_secret, write_key_file
from kvdev.uri import KeySource

EXAMPLE = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
"""The example of Base 2.1, 8.3.4.5.8."""
NQN = "nqn.2014-08.org.nvmexpress:uuid:7c6e3b6e-43a1-4f6c-9d6c-000000000001"


def printed(secret: bytes, *, transform: str = "00", crc: int | None = None) -> str:
    value = zlib.crc32(secret) if crc is None else crc
    return f"DHHC-1:{transform}:{base64.b64encode(secret + value.to_bytes(4, 'little')).decode()}:"


def test_parse_when_specification_example_then_its_bytes_come_back() -> None:
    secret = DhchapSecret.parse(EXAMPLE + "\n", where="file")
    assert (secret.size_bytes, secret.transform) == (32, 0)
    assert secret.text() == EXAMPLE
    assert secret.key_for(NQN).hex().startswith("89aeb31a874eaf84841b46736b0dfdf2")


@pytest.mark.parametrize("size_bytes", [32, 48, 64])
@pytest.mark.parametrize("transform", [0, 1, 2, 3])
def test_generate_then_parse_gives_the_same_secret(size_bytes: int, transform: int) -> None:
    made = DhchapSecret.generate(size_bytes=size_bytes, transform=transform)
    assert DhchapSecret.parse(made.text(), where="file") == made
    assert made != DhchapSecret.generate(size_bytes=size_bytes, transform=transform)


@pytest.mark.parametrize(
    ("transform", "name", "size"), [(1, "sha256", 32), (2, "sha384", 48), (3, "sha512", 64)]
)
def test_key_when_transformed_then_it_is_the_hmac_over_the_nqn(transform: int, name: str, size: int) -> None:
    secret = bytes(range(32))
    key = DhchapSecret(secret, transform).key_for(NQN)
    assert len(key) == size
    assert key == hmac.new(secret, NQN.encode() + b"NVMe-over-Fabrics", getattr(hashlib, name)).digest()
    assert DhchapSecret(secret, transform).key_for(NQN + "x") != key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "DHHC-1:hh:BASE64:"),
        ("secret", "DHHC-1:hh:BASE64:"),
        (EXAMPLE[:-1], "DHHC-1:hh:BASE64:"),
        (EXAMPLE + "x", "DHHC-1:hh:BASE64:"),
        (EXAMPLE + "\n" + EXAMPLE, "DHHC-1:hh:BASE64:"),
        (EXAMPLE.replace("-1", "-2"), "DHHC-1:hh:BASE64:"),
        (EXAMPLE.replace(":00:", ":04:"), "00, 01, 02 or 03"),
        (EXAMPLE.replace(":00:", ":0:"), "00, 01, 02 or 03"),
        (EXAMPLE.replace("ia6z", "ia*z"), "base64"),
        (EXAMPLE.replace("ia6z", "ia6"), "base64"),
        (printed(bytes(31)), "35 bytes in all"),
        (printed(bytes(33)), "37 bytes in all"),
        (printed(b""), "4 bytes in all"),
        (printed(bytes(32), crc=1), "checksum does not match"),
        (EXAMPLE.replace("ia6z", "ib6z"), "checksum does not match"),
    ],
)
def test_parse_when_malformed_then_error_says_how_and_has_nothing_of_it(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        DhchapSecret.parse(text, where="dhchap-key: file:/k")
    assert str(caught.value).startswith("dhchap-key: file:/k: ") and expected in str(caught.value)
    assert "6zGodOr4SEG0Z" not in str(caught.value) and "AAAAAAAA" not in str(caught.value)


def test_secret_when_shown_then_its_bytes_are_not() -> None:
    secret = DhchapSecret.parse(EXAMPLE, where="file")
    for text in (repr(secret), str(secret), f"{secret!r}", f"{[secret]}"):
        assert text.strip("[]") == "DhchapSecret(32 bytes, transform 00)"
    with pytest.raises(TypeError):
        hash(secret)


def test_secret_when_size_or_transform_is_wrong_then_refused() -> None:
    with pytest.raises(UsageError, match="got 16"):
        DhchapSecret(bytes(16))
    with pytest.raises(UsageError, match="transform"):
        DhchapSecret(bytes(32), 4)
    with pytest.raises(UsageError, match="got 33"):
        DhchapSecret.generate(size_bytes=33)


# ---- files ----


def test_file_when_private_then_read_and_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(str(path), EXAMPLE, field="output")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(KeySource("file", str(path)), field="dhchap-key").text() == EXAMPLE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o666])
def test_file_when_others_may_read_it_then_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text(EXAMPLE)
    path.chmod(mode)
    with pytest.raises(
        UsageError, match=rf"mode: expected 0600, got {mode:04o}: .*chmod 600 {path}"
    ) as caught:
        read_secret(KeySource("file", str(path)), field="dhchap-key")
    assert "6zGod" not in str(caught.value)


def test_file_when_none_or_no_key_then_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "big").write_bytes(b"x" * 4097)
    (tmp_path / "binary").write_bytes(b"\xff" * 32)
    for name in ("big", "binary"):
        (tmp_path / name).chmod(0o600)
    for name, expected in (
        ("none", "No such file"),
        ("", "regular file"),
        ("fifo", "regular file"),
        ("big", "at most 4096 bytes"),
        ("binary", "ASCII"),
    ):
        with pytest.raises(UsageError, match=expected):
            read_secret(KeySource("file", str(tmp_path / name)), field="dhchap-key")


def test_file_when_there_already_then_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    with pytest.raises(UsageError, match="exists"):
        write_key_file(str(path), EXAMPLE, field="output")
    assert path.read_text() == "old"
    with pytest.raises(UsageError, match="folder of yours"):
        write_key_file(str(tmp_path / "none" / "key"), EXAMPLE, field="output")
    assert read_key_file_error(path) == "mode"


def read_key_file_error(path: Path) -> str:
    path.chmod(0o644)
    with pytest.raises(UsageError) as caught:
        read_key_file(str(path), field="key")
    return str(caught.value).split(": ")[2]


# ---- keyring ----


def add_key(name: str, payload: bytes) -> int:
    """A key in this process's own keyring; -1 where the kernel has no keyrings for us."""
    numbers = {"x86_64": 248, "aarch64": 217}
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    process_keyring = -2
    return int(
        syscall(
            numbers.get(platform.machine(), -1),
            b"user",
            name.encode(),
            payload,
            len(payload),
            process_keyring,
        )
    )


def test_keyring_when_key_is_there_then_read_by_name_and_number() -> None:
    serial = add_key("kvdev-test-key", EXAMPLE.encode())
    if serial < 0:
        with pytest.raises((UnsupportedError, UsageError), match="keyring"):
            read_keyring("kvdev-test-key", field="dhchap-key")
        pytest.skip("the kernel's keyrings may not be used here (a container without keyctl)")
    assert read_keyring("kvdev-test-key", field="key") == EXAMPLE.encode()
    assert read_secret(KeySource("keyring", str(serial)), field="key").text() == EXAMPLE
    assert read_secret(KeySource("keyring", hex(serial)), field="key").text() == EXAMPLE


def test_keyring_when_key_is_not_there_then_error_has_the_remedy() -> None:
    with pytest.raises(
        (UsageError, UnsupportedError), match=r"keyring:kvdev-none: .*(keyctl padd|file:/PATH)"
    ):
        read_keyring("kvdev-none", field="dhchap-key")
