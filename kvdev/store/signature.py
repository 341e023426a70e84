"""What is on a device already, and who uses it: nothing is overwritten unseen.

Not here: the decision to overwrite (``volume``).
Trust: reads untrusted bytes and interprets none beyond recognising them, and the name in an intact label of ours.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdev.block.device import BlockDevice, flush, read_blocks, write_blocks
from kvdev.block.file import FileDevice
from kvdev.clock import Deadline
from kvdev.errors import CorruptionError
from kvdev.store.label import LABEL_BYTES, parse_label
from kvdev.store.media import MAGIC_LABEL, MAGIC_SUPERBLOCK
from kvdev.units import KIB, MIB

WINDOW_BYTES = MIB
"""Every known signature lies within this much of the start or the end of a device."""


@dataclass(frozen=True)
class Signature:
    """Something recognised: what, and where on the device."""

    what: str
    offset_bytes: int

    def __str__(self) -> str:
        return f"{self.what} at byte {self.offset_bytes}"


_FROM_START: tuple[tuple[str, int, bytes], ...] = (
    ("kvdev volume label", 0, MAGIC_LABEL),
    ("kvdev volume superblock", 4096, MAGIC_SUPERBLOCK),
    ("kvdev volume superblock", 8192, MAGIC_SUPERBLOCK),
    ("GPT partition table", 512, b"EFI PART"),
    ("GPT partition table", 4096, b"EFI PART"),
    ("ext2/3/4 file system", 0x438, b"\x53\xef"),
    ("XFS file system", 0, b"XFSB"),
    ("btrfs file system", 0x10040, b"_BHRfS_M"),
    ("bcachefs file system", 0x1018, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef")),
    ("F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    ("NTFS file system", 3, b"NTFS    "),
    ("exFAT file system", 3, b"EXFAT   "),
    ("FAT file system", 54, b"FAT1"),
    ("FAT file system", 82, b"FAT32   "),
    ("reiserfs file system", 0x10034, b"ReIsEr"),
    ("JFS file system", 0x8000, b"JFS1"),
    ("HFS+ file system", 1024, b"H+\x00\x04"),
    ("HFSX file system", 1024, b"HX\x00\x05"),
    ("APFS container", 32, b"NXSB"),
    ("squashfs file system", 0, b"hsqs"),
    ("erofs file system", 1024, b"\xe2\xe1\xf5\xe0"),
    ("ISO 9660 file system", 0x8001, b"CD001"),
    ("UDF file system", 0x8001, b"BEA01"),
    ("GFS2 or OCFS2 file system", 0x10000, b"\x01\x16\x19\x70"),
    ("OCFS2 file system", 0x2000, b"OCFSV2"),
    ("Ceph BlueStore", 0, b"bluestore block device"),
    ("VMFS volume", 0x100000 - 16, b"\x0d\xd0\x01\xc0"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("swap space", 4086, b"SWAP-SPACE"),
    ("swap space", 16374, b"SWAPSPACE2"),
    ("swap space", 65526, b"SWAPSPACE2"),
    ("suspended system image", 4086, b"S1SUSPEND"),
    ("LUKS encryption", 0, b"LUKS\xba\xbe"),
    ("LUKS2 encryption, second header", 0x4000, b"SKUL\xba\xbe"),
    ("BitLocker encryption", 3, b"-FVE-FS-"),
    ("md RAID superblock 1.1", 0, b"\xfc\x4e\x2b\xa9"),
    ("md RAID superblock 1.2", 4096, b"\xfc\x4e\x2b\xa9"),
    ("bcache cache or backing device", 0x1018, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    ("dm-writecache cache", 0, (0x23489321).to_bytes(4, "little")),
    ("dm-cache metadata", 32, (0o6142003).to_bytes(8, "little")),
    ("dm-thin metadata", 32, (27022010).to_bytes(8, "little")),
    ("dm-integrity device", 0, b"integrt\0"),
    ("dm-verity hash device", 0, b"verity\0\0"),
    ("VDO volume", 0, b"dmvdo001"),
    ("Stratis pool member", 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("SPDK RAID superblock", 0, b"SPDKRAID"),
    ("SPDK blobstore", 0, b"SPDKBLOB"),
)
"""Name, byte offset and bytes of signatures near the start of a device."""

_LVM_SECTORS = range(0, 4 * 512, 512)
_ZFS_UBERBLOCK = (0x00BAB10C).to_bytes(8, "little")
_ZFS_UBERBLOCK_SWAPPED = (0x00BAB10C).to_bytes(8, "big")
_ZFS_LABEL_BYTES = 256 * KIB


def find_signatures(device: BlockDevice, deadline: Deadline) -> list[Signature]:
    """Everything recognised on the device, by place; reads its first and last MiB."""
    start = _read_window(device, 0, deadline)
    end_offset = max(0, device.size_bytes - WINDOW_BYTES)
    end_offset -= end_offset % device.block_size_bytes
    end = _read_window(device, end_offset, deadline)
    found = [
        *_start_signatures(start),
        *_mbr_signatures(start),
        *_end_signatures(end, end_offset, device.size_bytes, device.block_size_bytes),
        *_zfs_signatures(start, 0, device.size_bytes),
        *_zfs_signatures(end, end_offset, device.size_bytes),
    ]
    return sorted(set(found), key=lambda signature: signature.offset_bytes)


def _read_window(device: BlockDevice, offset: int, deadline: Deadline) -> bytes:
    size_bytes = min(WINDOW_BYTES, device.size_bytes - offset)
    block = device.block_size_bytes
    return read_blocks(device, offset // block, size_bytes // block, deadline).tobytes()


def _start_signatures(start: bytes) -> Iterator[Signature]:
    for what, offset, pattern in _FROM_START:
        if start[offset : offset + len(pattern)] == pattern:
            yield Signature(what + _volume_named(start) if pattern == MAGIC_LABEL else what, offset)
    for offset in _LVM_SECTORS:
        if start[offset : offset + 8] == b"LABELONE" and start[offset + 24 : offset + 32] == b"LVM2 001":
            yield Signature("LVM physical volume", offset)


def _volume_named(start: bytes) -> str:
    try:
        return f" of volume {parse_label(start[:LABEL_BYTES], what='label').volume_name!r}"
    except CorruptionError:
        return ""


def _mbr_signatures(start: bytes) -> Iterator[Signature]:
    """The boot signature with a partition entry, or alone: a boot sector without a table counts too."""
    if start[510:512] == b"\x55\xaa":
        entries = [start[446 + 16 * index : 462 + 16 * index] for index in range(4)]
        is_table = any(entry[4] and entry[0] in (0x00, 0x80) for entry in entries)
        yield Signature("MBR partition table" if is_table else "boot sector", 510)


def _end_signatures(end: bytes, end_offset: int, size_bytes: int, block_bytes: int) -> Iterator[Signature]:
    sectors = size_bytes // 512
    places = [
        # The kernel puts version 0.90 in the last whole 64 KiB but one, 1.0 at least 8 KiB from the end.
        ("md RAID superblock 0.90", (size_bytes & ~0xFFFF) - 0x10000, b"\xfc\x4e\x2b\xa9"),
        ("md RAID superblock 1.0", ((sectors - 16) & ~7) * 512, b"\xfc\x4e\x2b\xa9"),
        ("GPT partition table, second header", size_bytes - block_bytes, b"EFI PART"),
        ("GPT partition table, second header", size_bytes - 512, b"EFI PART"),
        ("DRBD metadata", size_bytes - 4096 + 60, (0x8374026D).to_bytes(4, "big")),
        ("DDF RAID metadata", size_bytes - 512, b"\xde\x11\xde\x11"),
        ("Intel Matrix RAID metadata", size_bytes - 1024, b"Intel Raid ISM Cfg Sig."),
    ]
    for what, offset, pattern in places:
        within = offset - end_offset
        if within >= 0 and end[within : within + len(pattern)] == pattern:
            yield Signature(what, offset)


def _zfs_signatures(window: bytes, window_offset: int, size_bytes: int) -> Iterator[Signature]:
    """ZFS keeps four labels of 256 KiB, two at each end; their second half is an array of uberblocks."""
    aligned_size = size_bytes - size_bytes % _ZFS_LABEL_BYTES
    for label in (0, _ZFS_LABEL_BYTES, aligned_size - 2 * _ZFS_LABEL_BYTES, aligned_size - _ZFS_LABEL_BYTES):
        first = label + 128 * KIB - window_offset
        for within in range(first, first + 128 * KIB, KIB):
            if within >= 0 and window[within : within + 8] in (_ZFS_UBERBLOCK, _ZFS_UBERBLOCK_SWAPPED):
                yield Signature("ZFS pool member", label)
                break


def find_users(device: BlockDevice) -> list[str]:
    """Who holds a block device of this machine: mounts, swap, holders such as md and LVM, its partitions'."""
    if not isinstance(device, FileDevice) or not device.is_block_device:
        return []
    number = os.fstat(device.fd).st_rdev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    nodes = [folder, *(part.parent for part in sorted(folder.glob("*/partition")))]
    users = []
    for node in nodes:
        name = node.name
        users += [f"{name} is held by {holder.name}" for holder in sorted(node.glob("holders/*"))]
        try:
            node_number = (node / "dev").read_text().strip()
        except OSError:
            continue
        users += [f"{name} is mounted on {place}" for place in mounts_of(node_number)]
        users += [f"{name} is swap space in use" for _ in _swaps_of(node_number)]
    return users


def mounts_of(device_number: str) -> Iterator[str]:
    """Mount points of a device, ``major:minor``."""
    # proc(5): the third field of mountinfo is major:minor, the fifth the mount point.
    for line in _lines("/proc/self/mountinfo"):
        fields = line.split()
        if len(fields) > 4 and fields[2] == device_number:
            yield fields[4]


def _swaps_of(device_number: str) -> Iterator[str]:
    for line in _lines("/proc/swaps")[1:]:
        path = Path(line.split()[0]) if line.split() else Path()
        try:
            status = path.stat()
        except OSError:
            continue
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        if stat.S_ISBLK(status.st_mode) and number == device_number:
            yield str(path)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def wipe(device: BlockDevice, deadline: Deadline) -> None:
    """Zero both windows that signatures lie in, and flush, so that nobody recognises the old content."""
    end_offset = max(0, device.size_bytes - WINDOW_BYTES)
    end_offset -= end_offset % device.block_size_bytes
    for offset in {0, end_offset}:
        size_bytes = min(WINDOW_BYTES, device.size_bytes - offset)
        write_blocks(device, offset // device.block_size_bytes, bytes(size_bytes), deadline)
    flush(device, deadline)
