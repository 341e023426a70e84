"""Queue entries, status names, commands and their limits."""

from __future__ import annotations

import pytest

from kvdev.errors import UsageError
from kvdev.opcode import command_name
from kvdev.wire import nvme
from kvdev.wire.nvme import Cqe, FabricsStatus, Status


def test_cqe_when_status_fields_are_set_then_each_is_read() -> None:
    cqe = Cqe(status_p=(1 << 14 | 2 << 11 | 3 << 8 | 0x02) << 1 | 1)
    assert (cqe.sct, cqe.sc, cqe.crd, cqe.dnr, cqe.is_success) == (3, 2, 2, True, False)
    assert Cqe(status_p=1).is_success  # the phase bit is no status
    assert Cqe.of(cid=1, dw0=1, dw1=2).result64 == 1 | 2 << 32


@pytest.mark.parametrize(
    ("status", "is_fabrics", "text"),
    [
        (Status.SUCCESS, False, "success (00/00h)"),
        (Status.LBA_OUT_OF_RANGE, False, "lba out of range (00/80h)"),
        (Status.TRANSIENT_TRANSPORT_ERROR | nvme.STATUS_DNR, False, "transient transport error (00/22h)"),
        (0x182, True, "connect invalid parameters (01/82h)"),
        (0x182, False, "write to read only range (01/82h)"),
        (0x109, True, "invalid log page (01/09h)"),
        (0x7C0, False, "vendor status (07/c0h)"),
        (0x4FF, False, "reserved status (04/ffh)"),
    ],
)
def test_status_name_when_any_code_then_text(status: int, is_fabrics: bool, text: str) -> None:
    assert nvme.status_name(status, is_fabrics=is_fabrics) == text


def test_opcode_name_when_set_differs_then_its_own_name() -> None:
    assert nvme.opcode_name(2, is_admin=True) == "get log page (02h)"
    assert nvme.opcode_name(2, is_admin=False) == "read (02h)"
    assert nvme.opcode_name(0x7F, is_admin=False) == "fabrics (7fh)"
    assert nvme.opcode_name(0xC0, is_admin=True) == "opcode (c0h)"
    assert nvme.opcode_name(9, is_admin=False) == "deallocate (09h)"


def test_command_name_when_of_fabrics_then_its_type_is_named() -> None:
    sqe = bytearray(64)
    sqe[0], sqe[4] = 0x7F, 0x01
    assert command_name(bytes(sqe), is_admin=True) == "fabrics connect (7fh/01h)"
    sqe[4] = 0x33
    assert command_name(bytes(sqe), is_admin=False) == "fabrics command (7fh/33h)"
    assert command_name(bytes([0x0E]) + bytes(63), is_admin=False) == "reservation report (0eh)"
    assert command_name(bytes([0x0E]) + bytes(63), is_admin=True) == "opcode (0eh)"


def test_command_error_when_made_then_facts_are_attributes() -> None:
    error = nvme.command_error(
        "192.0.2.1:4420",
        FabricsStatus.CONNECT_INVALID_HOST | nvme.STATUS_DNR,
        opcode=0x7F,
        is_admin=True,
        detail="host not allowed",
    )
    assert str(error) == (
        "192.0.2.1:4420: fabrics (7fh): connect invalid host (01/84h), do not retry: host not allowed"
    )
    assert (error.sct, error.sc, error.dnr, error.is_retryable) == (1, 0x84, True, False)


@pytest.mark.parametrize("byte_count", [0, 2, 5])
def test_get_log_page_when_not_dwords_then_usage_error(byte_count: int) -> None:
    with pytest.raises(UsageError, match=f"got {byte_count} at 0"):
        nvme.GetLogPageCommand(lid=2, byte_count=byte_count).to_sqe()


@pytest.mark.parametrize(("lba_count", "is_legal"), [(0, False), (1, True), (65536, True), (65537, False)])
def test_read_when_block_count_at_limits_then_0based(lba_count: int, is_legal: bool) -> None:
    if not is_legal:
        with pytest.raises(UsageError, match="lba_count"):
            nvme.build_read_write(2, nsid=1, slba=0, lba_count=lba_count, byte_count=0)
        return
    sqe = nvme.build_read_write(2, nsid=1, slba=1 << 40, lba_count=lba_count, byte_count=512, fua=True)
    assert sqe.cdw12 == (lba_count - 1) | 1 << 30
    assert sqe.cdw10 | sqe.cdw11 << 32 == 1 << 40


def test_transfer_when_in_capsule_then_offset_descriptor() -> None:
    sqe = nvme.build_read_write(1, nsid=1, slba=0, lba_count=1, byte_count=512)
    assert (sqe.sgl_type, sqe.flags) == (nvme.SGL_TRANSPORT, nvme.PSDT_SGL)
    assert sqe.with_transfer(512, in_capsule=True).sgl_type == nvme.SGL_IN_CAPSULE
    assert nvme.build_flush(nsid=1).sgl_len == 0


@pytest.mark.parametrize(("count", "is_legal"), [(0, False), (1, True), (256, True), (257, False)])
def test_deallocate_when_range_count_at_limits_then_0based(count: int, is_legal: bool) -> None:
    if not is_legal:
        with pytest.raises(UsageError, match="range_count"):
            nvme.build_dsm_deallocate(nsid=1, range_count=count)
        return
    sqe = nvme.build_dsm_deallocate(nsid=1, range_count=count)
    assert (sqe.cdw10, sqe.cdw11, sqe.sgl_len) == (count - 1, 4, 16 * count)


def test_small_commands_when_built_then_opcode_and_parameters() -> None:
    assert nvme.build_keep_alive(cid=3).opc == 0x18
    assert nvme.build_async_event_request().opc == 0x0C
    abort = nvme.AbortCommand(sqid=2, command_cid=0x8001)
    assert nvme.AbortCommand.from_sqe(abort.to_sqe()) == abort
    get = nvme.FeaturesCommand(fid=0x0F, is_set=False, select=3)
    assert nvme.FeaturesCommand.from_sqe(get.to_sqe()) == get
    event = nvme.AsyncEvent(nvme.AsyncEventType.NOTICE, nvme.Notice.ANA_CHANGE, 0x0C)
    assert nvme.AsyncEvent.parse(event.build()) == event
    assert event.build() == 0x0C0302
