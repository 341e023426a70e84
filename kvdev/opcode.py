"""Opcodes of the Admin and NVM command sets and types of Fabrics commands, and their names: the one table of them.

Spec: NVM Express Base 2.2 sections 3.3.3.2.1, 5, 6, 7; NVM Command Set 1.0 section 3.
"""

from __future__ import annotations

import enum


class AdminOpcode(enum.IntEnum):
    DELETE_IO_SQ = 0x00
    CREATE_IO_SQ = 0x01
    GET_LOG_PAGE = 0x02
    DELETE_IO_CQ = 0x04
    CREATE_IO_CQ = 0x05
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    NAMESPACE_MANAGEMENT = 0x0D
    NAMESPACE_ATTACHMENT = 0x15
    KEEP_ALIVE = 0x18
    DIRECTIVE_SEND = 0x19
    DIRECTIVE_RECEIVE = 0x1A
    FORMAT_NVM = 0x80
    SECURITY_SEND = 0x81
    SECURITY_RECEIVE = 0x82
    SANITIZE = 0x84
    FABRICS = 0x7F


class NvmOpcode(enum.IntEnum):
    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_UNCORRECTABLE = 0x04
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DSM = 0x09
    VERIFY = 0x0C
    RESERVATION_REGISTER = 0x0D
    RESERVATION_REPORT = 0x0E
    RESERVATION_ACQUIRE = 0x11
    RESERVATION_RELEASE = 0x15
    COPY = 0x19


class FabricsType(enum.IntEnum):
    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTHENTICATION_SEND = 0x05
    AUTHENTICATION_RECEIVE = 0x06
    DISCONNECT = 0x08


_DEALLOCATE = "deallocate"
"""What the one use that is made of Dataset Management does."""


def opcode_word(opcode: int, *, is_admin: bool = False) -> str:
    """Its name alone: ``read``; ``opcode`` where it has none."""
    table: type[enum.IntEnum] = AdminOpcode if is_admin or opcode == AdminOpcode.FABRICS else NvmOpcode
    try:
        member = table(opcode)
    except ValueError:
        return "opcode"
    return _DEALLOCATE if member is NvmOpcode.DSM else member.name.lower().replace("_", " ")


def opcode_name(opcode: int, *, is_admin: bool) -> str:
    """Readable name of an opcode: ``read (02h)``."""
    return f"{opcode_word(opcode, is_admin=is_admin)} ({opcode:02x}h)"


def command_name(sqe: bytes, *, is_admin: bool) -> str:
    """Readable name of a 64-byte command: as ``opcode_name``, with the type of a Fabrics command."""
    if sqe[0] != AdminOpcode.FABRICS:
        return opcode_name(sqe[0], is_admin=is_admin)
    word = FabricsType(sqe[4]).name.lower().replace("_", " ") if sqe[4] in tuple(FabricsType) else "command"
    return f"fabrics {word} ({sqe[0]:02x}h/{sqe[4]:02x}h)"
