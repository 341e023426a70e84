"""Connect, properties and the register layouts."""

from __future__ import annotations

import pytest

from kvdev.errors import UsageError
from kvdev.wire import fabrics
from kvdev.wire.fabrics import Cap, Cc, ConnectResult, Csts, InvalidParameter, PropertyCommand
from kvdev.wire.nvme import Cqe, FabricsStatus, Sqe


@pytest.mark.parametrize(
    ("dw0", "text"),
    [
        (0x00010000, "connect data byte 0 (hostid)"),
        (0x00010010, "connect data byte 16 (cntlid)"),
        (0x00010100, "connect data byte 256 (subnqn)"),
        (0x00010200, "connect data byte 512 (hostnqn)"),
        (0x0000002A, "connect command byte 42 (qid)"),
        (0x0000002C, "connect command byte 44 (sqsize)"),
        (0x00000030, "connect command byte 48 (kato)"),
        (0x00000000, "connect command byte 0 (reserved)"),
    ],
)
def test_invalid_parameter_when_parsed_then_field_is_named(dw0: int, text: str) -> None:
    parameter = InvalidParameter.parse(dw0)
    assert str(parameter) == text
    assert parameter.build() == dw0


def test_connect_error_when_parameters_are_invalid_then_detail() -> None:
    cqe = Cqe.of(
        FabricsStatus.CONNECT_INVALID_PARAMETERS, cid=0, dw0=InvalidParameter.of("sqsize").build(), dnr=True
    )
    assert fabrics.connect_error_detail(cqe) == "the controller refuses connect command byte 44 (sqsize)"
    assert fabrics.connect_error_detail(Cqe.of(FabricsStatus.CONTROLLER_BUSY, cid=0)) == ""
    with pytest.raises(UsageError, match="no field is called 'nothing'"):
        InvalidParameter.of("nothing")


@pytest.mark.parametrize("result", [ConnectResult(1, False, False), ConnectResult(0xFFEF, True, True)])
def test_connect_result_when_built_then_parsed(result: ConnectResult) -> None:
    assert ConnectResult.parse(result.build()) == result


def test_property_when_size_is_reserved_then_zero() -> None:
    command = PropertyCommand.from_sqe(Sqe(opc=0x7F, nsid=4, cdw10=2, cdw11=0))
    assert command.size_bytes == 0
    with pytest.raises(UsageError, match="expected 4 or 8 bytes, got 0"):
        command.to_sqe()


def test_property_when_four_bytes_then_upper_half_is_ignored() -> None:
    sqe = PropertyCommand(offset=0x14, size_bytes=8, is_set=True, value=0x1122334455667788).to_sqe()
    assert PropertyCommand.from_sqe(sqe).value == 0x1122334455667788
    narrow = PropertyCommand.from_sqe(Sqe(opc=0x7F, nsid=0, cdw10=0, cdw11=0x14, cdw12=5, cdw13=9))
    assert narrow.value == 5


def test_registers_when_known_values_then_fields() -> None:
    cap = Cap.parse(0x0008_0020_1E01_007F | 1 << 59)
    assert (cap.mqes_0based, cap.cqr, cap.to_500ms, cap.css, cap.crwms) == (127, 1, 30, 1, 1)
    assert cap.has_nvm_command_set and not cap.has_io_command_sets
    assert cap.page_size_bytes_min == 1 << 20  # MPSMIN 8
    assert Cc(en=1, iosqes=6, iocqes=4, shn=fabrics.Shn.NORMAL).build() == 0x00464001
    assert Csts.parse(0b1001) == Csts(rdy=1, shst=fabrics.Shst.COMPLETE)
    assert str(fabrics.Version.parse(0x00020100)) == "2.1.0"
    assert fabrics.Crto.parse(0x0002_0003) == fabrics.Crto(crwmt_500ms=3, crimt_500ms=2)
    assert set(fabrics.PROPERTY_BYTES) == set(fabrics.Property)


def test_disconnect_when_built_then_fabrics_type_8() -> None:
    assert fabrics.build_disconnect().fctype == 8
