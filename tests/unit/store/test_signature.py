"""What is on a device is recognised, from fixtures built by hand and from the tools themselves."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvdev.block.file import FileDevice
from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.store.signature import find_signatures, find_users, mounts_of, wipe

SIZE = 16 << 20
MD_MAGIC = struct.pack("<I", 0xA92B4EFC)


def soon() -> Deadline:
    return Deadline.after(30)


def gpt(block: int) -> list[tuple[int, bytes]]:
    mbr = bytearray(512)
    mbr[446 + 4] = 0xEE
    mbr[510:512] = b"\x55\xaa"
    return [(0, bytes(mbr)), (block, b"EFI PART"), (SIZE - block, b"EFI PART")]


def mbr_partition() -> bytes:
    entry = struct.pack("<B3sB3sII", 0x80, b"\0\2\0", 0x83, b"\0\0\0", 2048, 1000)
    return bytes(446) + entry + bytes(48) + b"\x55\xaa"


BCACHE = bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")
FIXTURES: list[tuple[str, list[tuple[int, bytes]]]] = [
    ("MBR partition table", [(0, mbr_partition())]),
    ("boot sector", [(510, b"\x55\xaa")]),
    ("GPT partition table", gpt(512)),
    ("GPT partition table", gpt(4096)),
    ("GPT partition table, second header", [(SIZE - 512, b"EFI PART")]),
    ("ext2/3/4 file system", [(1080, b"\x53\xef")]),
    ("XFS file system", [(0, b"XFSB")]),
    ("btrfs file system", [(65536 + 64, b"_BHRfS_M")]),
    ("NTFS file system", [(3, b"NTFS    ")]),
    ("FAT file system", [(82, b"FAT32   ")]),
    ("swap space", [(4086, b"SWAPSPACE2")]),
    ("LUKS encryption", [(0, b"LUKS\xba\xbe\0\2")]),
    ("LVM physical volume", [(512, b"LABELONE" + bytes(16) + b"LVM2 001")]),
    ("md RAID superblock 0.90", [(SIZE - 65536, MD_MAGIC)]),
    ("md RAID superblock 1.0", [(SIZE - 8192, MD_MAGIC)]),
    ("md RAID superblock 1.1", [(0, MD_MAGIC)]),
    ("md RAID superblock 1.2", [(4096, MD_MAGIC)]),
    ("bcache cache or backing device", [(4096 + 24, BCACHE)]),
    ("ZFS pool member", [(128 * 1024 + 5 * 1024, struct.pack("<Q", 0x00BAB10C))]),
    ("ZFS pool member", [(SIZE - 256 * 1024 + 128 * 1024, struct.pack(">Q", 0x00BAB10C))]),
    ("SPDK blobstore", [(0, b"SPDKBLOB")]),
    ("kvdev volume label", [(0, b"KDEVVLBL")]),
    ("dm-cache metadata", [(32, struct.pack("<Q", 0o6142003))]),
]


@pytest.mark.parametrize(("what", "pieces"), FIXTURES, ids=[f"{w}-{p[0][0]}" for w, p in FIXTURES])
def test_signature_when_present_is_found_and_wiped(what: str, pieces: list[tuple[int, bytes]]) -> None:
    device = MemoryDevice(size_bytes=SIZE, block_size_bytes=512)
    for offset, data in pieces:
        device.data[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
    assert what in [signature.what for signature in find_signatures(device, soon())]
    wipe(device, soon())
    assert find_signatures(device, soon()) == []


@pytest.mark.parametrize("size", [4096, 65536, 1 << 20, (1 << 20) + 4096, SIZE])
def test_blank_or_plain_device_when_scanned_has_none(size: int) -> None:
    device = MemoryDevice(size_bytes=size)
    assert find_signatures(device, soon()) == []
    device.data[:] = ord("a")
    assert find_signatures(device, soon()) == []
    assert find_users(device) == []


def test_mounted_device_when_looked_up_names_the_mount_point() -> None:
    line = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - " in line)
    fields = line.split()
    assert fields[4] in list(mounts_of(fields[2]))
    assert list(mounts_of("4095:1048575")) == []


TOOLS = [
    (["mkfs.ext4", "-q", "-F"], "ext2/3/4 file system"),
    (["mkswap", "-q"], "swap space"),
    (["mkfs.xfs", "-q", "-f"], "XFS file system"),
    (["mkfs.btrfs", "-q", "-f"], "btrfs file system"),
    (["mkfs.vfat"], "FAT file system"),
    (["sfdisk", "-q"], "MBR partition table"),
]


@pytest.mark.parametrize(("command", "what"), TOOLS, ids=[command[0] for command, _ in TOOLS])
def test_signature_when_made_by_the_tool_itself_is_found(
    tmp_path: Path, command: list[str], what: str
) -> None:
    program = shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(320 << 20)
    made = subprocess.run(
        [program, *command[1:], str(path)], input=b"start=2048,size=2048\n", capture_output=True, timeout=60
    )
    if made.returncode:
        pytest.skip(f"{command[0]} failed here: {made.stderr.decode(errors='replace')[:200]}")
    device = FileDevice(path)
    assert what in [signature.what for signature in find_signatures(device, soon())]
    device.close()
