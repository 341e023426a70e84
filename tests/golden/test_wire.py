"""Bytes equal the specification's: every structure is built to its golden file and parsed back from it.

Golden files are commented hex: ``@N xx xx`` puts bytes at offset N, ``@N`` alone extends with zeros to N.
KVDEV_GOLDEN=update rewrites those that differ; read the diff.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvdev.native import pdu as native
from kvdev.wire import fabrics, features, identify, log, nvme, pdu
from kvdev.wire.pdu import Framing, Role

HERE = Path(__file__).parent
ROW_BYTES = 16


def load_golden(name: str) -> bytes:
    """Bytes of ``name``.hex."""
    out = bytearray()
    for line in (HERE / f"{name}.hex").read_text().splitlines():
        if not line.startswith("@"):
            assert not line or line.startswith("#"), f"{name}.hex: {line!r} is neither comment nor @offset"
            continue
        place, _, text = line[1:].partition(" ")
        at, data = int(place), bytes.fromhex(text)
        assert at >= len(out), f"{name}.hex: @{at} overlaps what stands before it"
        out += bytes(at - len(out)) + data
    return bytes(out)


def check_golden(name: str, built: bytes) -> bytes:
    """Compare ``built`` with the file, or rewrite the file when asked to; returns the golden bytes."""
    if os.environ.get("KVDEV_GOLDEN") == "update" and load_golden(name) != built:
        _store(name, built)
    golden = load_golden(name)
    assert built == golden, first_difference(built, golden)
    return golden


def first_difference(built: bytes, golden: bytes) -> str:
    """Where two byte strings part."""
    for at, (left, right) in enumerate(zip(built, golden, strict=False)):
        if left != right:
            return f"byte {at}: built {left:#04x}, golden {right:#04x}"
    return f"built {len(built)} bytes, golden {len(golden)}"


def _store(name: str, data: bytes) -> None:
    """Keep the provenance comment at the top, replace the rest by rows."""
    path = HERE / f"{name}.hex"
    head = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        head.append(line)
    rows = [
        f"@{at} {data[at : at + ROW_BYTES].hex(' ')}"
        for at in range(0, len(data), ROW_BYTES)
        if any(data[at : at + ROW_BYTES])
    ]
    path.write_text("\n".join([*head, *rows, f"@{len(data)}"]) + "\n")


READ = nvme.Sqe(opc=nvme.NvmOpcode.READ, cid=0x1234, nsid=1, sgl_len=4096, cdw10=0x100, cdw12=7)
WRITE = nvme.Sqe(
    opc=nvme.NvmOpcode.WRITE, cid=2, nsid=7, sgl_len=8, sgl_type=nvme.SGL_IN_CAPSULE, cdw12=nvme.FUA
)
R2T_HEAD = bytes.fromhex("09001800180000000500090001000000001000000000 0000".replace(" ", ""))

PDUS: dict[str, tuple[pdu.Pdu, Framing]] = {
    "ic_req": (pdu.ICReq(hpda=31, hdgst=True, ddgst=True, maxr2t_0based=3), Framing()),
    "ic_resp": (pdu.ICResp(cpda=3, hdgst=True, maxh2cdata=131072), Framing(hdgst=True)),
    "h2c_term": (pdu.H2CTermReq(fes=pdu.Fes.INVALID_HEADER, fei=12, data=R2T_HEAD), Framing(hdgst=True)),
    "c2h_term": (
        pdu.C2HTermReq(fes=pdu.Fes.HDGST, fei=0xA1B2C3D4, data=bytes.fromhex("0601181c2c000000")),
        Framing(ddgst=True),
    ),
    "capsule_cmd_read": (pdu.CapsuleCmd(READ.build()), Framing()),
    "capsule_cmd_write_in_capsule": (
        pdu.CapsuleCmd(WRITE.build(), bytes(range(8))),
        Framing(hdgst=True, ddgst=True, pda=31),
    ),
    "capsule_resp": (pdu.CapsuleResp(bytes(16)), Framing(hdgst=True)),
    "h2c_data": (pdu.H2CData(0x102, 3, 4096, bytes(range(0x10, 0x18))), Framing(pda=3)),
    "c2h_data": (pdu.C2HData(5, 0, bytes(range(32)), is_success=True), Framing(ddgst=True)),
    "r2t": (pdu.R2T(5, 9, 65536, 131072), Framing()),
}


def receiver_of(value: pdu.Pdu) -> Role:
    return Role.TARGET if value.TYPE in pdu.TO_TARGET else Role.HOST


@pytest.mark.parametrize("name", PDUS)
def test_pdu_when_built_and_parsed_then_golden(name: str) -> None:
    value, framing = PDUS[name]
    golden = check_golden(name, pdu.build_pdu(value, framing))
    assert pdu.parse_pdu(golden, framing, receiver=receiver_of(value)) == value


@pytest.mark.parametrize("name", PDUS)
def test_machine_when_given_golden_then_accepts_it(name: str) -> None:
    value, framing = PDUS[name]
    golden = check_golden(name, pdu.build_pdu(value, framing))
    link = native.Link(hdgst=framing.hdgst, ddgst=framing.ddgst, recv_pda=framing.pda)
    is_ic = isinstance(value, (pdu.ICReq, pdu.ICResp))
    events = native.PduReceiver(receiver_of(value), link, is_agreed=not is_ic).feed(golden)
    data = getattr(value, "data", b"")
    has_payload = bool(data) and not isinstance(value, (pdu.H2CTermReq, pdu.C2HTermReq))
    assert isinstance(events[0], native.Header) and events[0].type == value.TYPE
    assert events[1:] == ([native.Data(data=data, ddgst_ok=True)] if has_payload else [])


# Term PDUs are built from a fault: tests/unit/native/test_pdu.py compares them.
@pytest.mark.parametrize("name", [name for name in PDUS if not name.endswith("_term")])
def test_c_builders_when_same_values_then_golden(name: str) -> None:
    value, framing = PDUS[name]
    golden = check_golden(name, pdu.build_pdu(value, framing))
    link = native.Link(hdgst=framing.hdgst, ddgst=framing.ddgst, send_pda=framing.pda)
    match value:
        case pdu.ICReq():
            built = native.build_ic_req(
                native.Link(
                    hdgst=value.hdgst, ddgst=value.ddgst, recv_pda=value.hpda, maxr2t=value.maxr2t_0based
                )
            )
        case pdu.ICResp():
            built = native.build_ic_resp(
                native.Link(
                    hdgst=value.hdgst, ddgst=value.ddgst, recv_pda=value.cpda, maxh2cdata=value.maxh2cdata
                )
            )
        case pdu.CapsuleCmd():
            built = native.build_capsule_cmd(link, value.sqe, len(value.data))
        case pdu.CapsuleResp():
            built = native.build_capsule_resp(link, value.cqe)
        case pdu.H2CData():
            built = native.build_h2c_data(
                link,
                cccid=value.cccid,
                ttag=value.ttag,
                datao=value.datao,
                datal=len(value.data),
                is_last=value.is_last,
            )
        case pdu.C2HData():
            flags = pdu.PduFlag.LAST | pdu.PduFlag.SUCCESS
            built = native.build_c2h_data(
                link, cccid=value.cccid, datao=value.datao, datal=len(value.data), flags=int(flags)
            )
        case pdu.R2T():
            built = native.build_r2t(
                link, cccid=value.cccid, ttag=value.ttag, r2to=value.r2to, r2tl=value.r2tl
            )
        case _:
            pytest.fail("no builder")
    assert golden.startswith(built) and len(built) >= golden[2]


STRUCTS: dict[str, Any] = {
    "sqe_connect": fabrics.ConnectCommand(qid=2, sqsize_0based=127, kato_ms=10000, cattr=4).to_sqe(),
    "sqe_property_set": fabrics.PropertyCommand(
        offset=fabrics.Property.CC,
        size_bytes=4,
        is_set=True,
        value=fabrics.Cc(en=1, iosqes=6, iocqes=4).build(),
    ).to_sqe(cid=3),
    "sqe_property_get": fabrics.PropertyCommand(
        offset=fabrics.Property.CAP, size_bytes=8, is_set=False
    ).to_sqe(cid=4),
    "sqe_identify": nvme.IdentifyCommand(cns=identify.Cns.CSI_NAMESPACE, nsid=3, cntid=7).to_sqe(cid=1),
    "sqe_get_log_page": nvme.GetLogPageCommand(
        lid=log.Lid.DISCOVERY, byte_count=262148, offset=0x100000400, retain_event=True
    ).to_sqe(cid=1),
    "sqe_set_features": nvme.FeaturesCommand(
        fid=features.Fid.NUMBER_OF_QUEUES,
        is_set=True,
        value=features.NumberOfQueues(4, 4).build(),
        save=True,
    ).to_sqe(cid=5),
    "cqe": nvme.Cqe.of(
        nvme.FabricsStatus.CONNECT_INVALID_PARAMETERS,
        cid=9,
        dnr=True,
        sqhd=1,
        dw0=fabrics.InvalidParameter.of("subnqn").build(),
    ),
    "connect_data": fabrics.ConnectData(
        hostid=bytes.fromhex("00112233445566778899aabbccddeeff"),
        subnqn="nqn.2016-06.io.spdk:cnode1",
        hostnqn="nqn.2014-08.org.nvmexpress:uuid:x",
    ),
    "identify_controller": identify.IdentifyController(
        sn="KVDEV0001",
        mn="kvdev target",
        fr="0.1",
        cmic=identify.CMIC_MULTI_CONTROLLER | identify.CMIC_ANA,
        mdts=5,
        cntlid=0x42,
        ver=0x20000,
        rtd3e_us=5_000_000,
        oaes=identify.OAES_NAMESPACE_ATTRIBUTE | identify.OAES_ANA_CHANGE,
        ctratt=identify.CTRATT_TBKAS,
        cntrltype=identify.ControllerType.IO,
        crdt1_100ms=1,
        crdt2_100ms=10,
        acl_0based=3,
        aerl_0based=3,
        lpa=identify.LPA_EFFECTS | identify.LPA_EXTENDED,
        elpe_0based=63,
        kas_100ms=10,
        anatt_s=10,
        anacap=identify.ANACAP_STATES,
        anagrpmax=16,
        nanagrpid=1,
        cqt_ms=1,
        sqes=0x66,
        cqes=0x44,
        maxcmd=128,
        nn=4,
        oncs=identify.ONCS_DSM | identify.ONCS_WRITE_ZEROES,
        fuses=identify.FUSES_COMPARE_AND_WRITE,
        vwc=identify.VWC_PRESENT | identify.VWC_FLUSH_ALL_NSID,
        awupf_0based=7,
        sgls=identify.SGLS_SUPPORTED | identify.SGLS_OFFSET | identify.SGLS_TRANSPORT,
        mnan=4,
        subnqn="nqn.a",
        ioccsz_16b=260,
        iorcsz_16b=1,
        msdbd=1,
    ),
    "identify_namespace": identify.IdentifyNamespace(
        nsze=1 << 20,
        ncap=1 << 20,
        nuse=1,
        nsfeat=identify.NSFEAT_OPTPERF | identify.NSFEAT_ATOMIC,
        nlbaf_0based=16,
        flbas=0x20,
        nmic=identify.NMIC_SHARED,
        dlfeat=1,
        nawun_0based=7,
        nawupf_0based=3,
        noiob=256,
        npwg_0based=7,
        npwa_0based=7,
        nulbaf=1,
        anagrpid=1,
        nguid=bytes(range(16)),
        eui64=bytes(range(16, 24)),
        lbaf=(
            identify.LbaFormat(lbads=9),
            *(identify.LbaFormat(lbads=0),) * 15,
            identify.LbaFormat(ms=8, lbads=12, rp=2),
            identify.LbaFormat(lbads=12),
        ),
    ),
    "ns_descriptor_list": identify.NsDescriptorList(
        eui64=bytes(range(0x10, 0x18)),
        nguid=bytes(range(16)),
        uuid=uuid.UUID(bytes=bytes(range(0x20, 0x30))),
        csi=identify.Csi.NVM,
    ),
    "csi_controller": identify.CsiControllerNvm(vsl=1, wzsl=8, wusl=2, dmrl=16, dmrsl=65536, dmsl=1 << 20),
    "csi_namespace": identify.CsiNamespaceNvm(lbstm=0xFF, pic=1, elbaf=(0x80, *(0,) * 62, 1)),
    "csi_independent_namespace": identify.CsiIndependentNamespace(
        nsfeat=0x10, nmic=1, rescap=0xFF, anagrpid=1, nsattr=1, nstat=identify.NSTAT_NRDY
    ),
    "log_error_entry": log.ErrorEntry(
        error_count=3,
        sqid=1,
        cid=0x1234,
        status_p=nvme.Status.LBA_OUT_OF_RANGE << 1,
        parameter_error_location=0xFFFF,
        lba=1 << 20,
        nsid=1,
        trtype=log.TransportType.TCP,
        opcode=nvme.NvmOpcode.READ,
    ),
    "log_smart": log.SmartLog(
        composite_temperature_kelvin=310,
        available_spare_percent=100,
        available_spare_threshold_percent=10,
        percentage_used=3,
        data_units_read=12345,
        data_units_written=1 << 64,
        host_read_commands=7,
        power_on_hours=1000,
        unsafe_shutdowns=2,
        warning_temperature_minutes=5,
    ),
    "log_firmware_slot": log.FirmwareSlotLog(afi=1, frs1="0.1"),
    "log_changed_ns": log.ChangedNsLog(nsids=(2, 7), has_overflowed=False),
    "log_effects": log.EffectsLog(admin={2: 1, 6: 1}, io={1: 3, 2: 1}),
    "log_discovery_header": log.DiscoveryHeader(genctr=9, numrec=2),
    "log_discovery_entry": log.DiscoveryEntry(
        treq=4, portid=1, eflags=3, trsvcid="4420", subnqn="nqn.a", traddr="192.0.2.1"
    ),
    "log_reservation": log.ReservationLog(
        log_page_count=2,
        notice_type=log.ReservationNotice.REGISTRATION_PREEMPTED,
        available_count=1,
        nsid=3,
    ),
}


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_when_built_and_parsed_then_golden(name: str) -> None:
    value = STRUCTS[name]
    golden = check_golden(name, value.build())
    assert type(value).parse(golden) == value


def test_ana_log_when_built_and_parsed_then_golden() -> None:
    value = log.AnaLog(
        change_count=5,
        groups=(
            log.AnaGroup(anagrpid=1, state=log.AnaState.OPTIMIZED, change_count=5, nsids=(1, 2)),
            log.AnaGroup(anagrpid=7, state=log.AnaState.INACCESSIBLE, change_count=4),
        ),
    )
    golden = check_golden("log_ana", value.build())
    assert log.AnaLog.parse(golden, anagrpmax=16) == value


def test_nsid_list_when_built_and_parsed_then_golden() -> None:
    nsids = [1, 2, 5, 0xFFFFFFFE]
    golden = check_golden("nsid_list", identify.build_nsid_list(nsids))
    assert identify.parse_nsid_list(golden) == nsids


def test_commands_when_parsed_from_golden_then_their_parameters() -> None:
    for name, command in (
        ("sqe_connect", fabrics.ConnectCommand(qid=2, sqsize_0based=127, kato_ms=10000, cattr=4)),
        ("sqe_identify", nvme.IdentifyCommand(cns=5, nsid=3, cntid=7)),
        ("sqe_property_set", fabrics.PropertyCommand(offset=0x14, size_bytes=4, is_set=True, value=0x460001)),
        ("sqe_property_get", fabrics.PropertyCommand(offset=0, size_bytes=8, is_set=False)),
        ("sqe_get_log_page", nvme.GetLogPageCommand(0x70, 262148, offset=0x100000400, retain_event=True)),
        ("sqe_set_features", nvme.FeaturesCommand(fid=7, is_set=True, value=0x30003, save=True)),
    ):
        sqe = nvme.Sqe.parse(check_golden(name, STRUCTS[name].build()))
        assert type(command).from_sqe(sqe) == command, name


def test_golden_files_when_listed_then_each_has_provenance_and_a_test() -> None:
    names = {path.stem for path in HERE.glob("*.hex")}
    assert names == {*PDUS, *STRUCTS, "log_ana", "nsid_list"}
    for name in names:
        assert (HERE / f"{name}.hex").read_text().startswith("# "), name
