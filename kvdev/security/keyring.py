"""Keys of the Linux kernel's keyrings, read by their description or serial number.

Threads: any; the system calls do not block, because no key is constructed on demand.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from typing import Any

from kvdev.errors import UnsupportedError, UsageError

_REQUEST_KEY = {"x86_64": 249, "aarch64": 218}
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_SEARCH = 10
_KEYCTL_READ = 11
_USER_KEYRING = -4
_KEY_TYPE = b"user"
KEY_SIZE_BYTES_MAX = 4096


def read_keyring(name: str, *, field: str) -> bytes:
    """The payload of a key of type ``user``: by serial number where ``name`` is one, else by description.

    The session's keyrings are searched, then the user's. Raises UsageError, or UnsupportedError where the
    kernel has no keyrings for us.
    """
    serial = int(name, 0) if _is_serial(name) else _search(name, field=field)
    buffer = ctypes.create_string_buffer(KEY_SIZE_BYTES_MAX)
    size = _call(_KEYCTL, _KEYCTL_READ, serial, buffer, KEY_SIZE_BYTES_MAX)
    if size < 0:
        raise _error(-size, name, field=field)
    if size > KEY_SIZE_BYTES_MAX:
        raise UsageError(f"{field}: keyring:{name}: expected at most {KEY_SIZE_BYTES_MAX} bytes, got {size}")
    found = buffer.raw[:size]
    ctypes.memset(buffer, 0, KEY_SIZE_BYTES_MAX)
    return found


def _is_serial(name: str) -> bool:
    return name.isdecimal() or (
        name.startswith("0x") and all(c in "0123456789abcdefABCDEF" for c in name[2:])
    )


def _search(name: str, *, field: str) -> int:
    description = name.encode()
    found = _call(_REQUEST_KEY, _KEY_TYPE, description, None, 0)
    if found == -errno.ENOKEY:
        found = _call(_KEYCTL, _KEYCTL_SEARCH, _USER_KEYRING, _KEY_TYPE, description, 0)
    if found < 0:
        raise _error(-found, name, field=field)
    return found


def _call(numbers: dict[str, int], *arguments: Any) -> int:
    """A system call's result, or −errno."""
    number = numbers.get(platform.machine())
    if number is None:
        return -errno.ENOSYS
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_syscall()(ctypes.c_long(number), *words))
    return result if result >= 0 else -ctypes.get_errno()


@functools.cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _error(number: int, name: str, *, field: str) -> UsageError | UnsupportedError:
    where = f"{field}: keyring:{name}"
    if number in (errno.ENOSYS, errno.EPERM):
        return UnsupportedError(
            f"{where}: this process may not use the kernel's keyrings ({os.strerror(number)}), as in many "
            f"containers; keep the key in a file: file:/PATH",
            feature="kernel keyring",
        )
    remedies = {
        errno.ENOKEY: f"add it with `keyctl padd user {name} @u`",
        errno.EACCES: "let this user read it with `keyctl setperm`",
        errno.EKEYEXPIRED: "it has expired: add a new one",
        errno.EKEYREVOKED: "it was revoked: add a new one",
    }
    return UsageError(f"{where}: {os.strerror(number)}; {remedies.get(number, 'name another key')}")
