"""Volumes written by earlier versions still open, with every page that was durable then.

``tests/data/volume_v1.xz`` holds two members of 1 MiB, one after the other, as format version 1 first wrote
them; ``volume_v3.xz`` the same with records of version 3, whose pages have NH-64. ``python
tests/unit/store/test_upgrade.py FILE CHECKSUM`` writes such an image with the kvdev of the day: a new format gets a new
file, the old ones stay.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.block.memory import MemoryDevice
from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.keys import KeyArray
from kvdev.store.check import check_volume
from kvdev.store.page_store import PageStore
from kvdev.store.volume import Volume

DATA = Path(__file__).resolve().parents[2] / "data"
MEMBER_BYTES = 1 << 20
GEOMETRY = Geometry(model_id="upgrade", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
PAGE = GEOMETRY.page_size_bytes
CLEAN_NUMBERS = range(8)
CRASHED_NUMBERS = range(20, 30)


def keys_of(numbers: range) -> KeyArray:
    return np.stack([np.full(32, number + 1, dtype=np.uint8) for number in numbers])


def pages_of(numbers: range, version: int) -> npt.NDArray[np.uint8]:
    return np.stack([np.full(PAGE, (7 * number + version) % 256, dtype=np.uint8) for number in numbers])


def build(checksum: str) -> bytes:
    """A namespace that was closed, and one whose owner died with records in the journal only."""
    deadline = Deadline.after(30)
    members = [MemoryDevice(size_bytes=MEMBER_BYTES, name=f"old{index}") for index in range(2)]
    volume = Volume.create(members, name="old", strip_size_bytes=16384, deadline=deadline)
    for name, numbers in (("clean", CLEAN_NUMBERS), ("crashed", CRASHED_NUMBERS)):
        volume.create_namespace(
            name, GEOMETRY, quota_pages=16, journal_block_count=8, checksum=checksum, deadline=deadline
        )
        store = PageStore(volume.open_namespace(name, deadline=deadline))
        store.put(keys_of(numbers), pages_of(numbers, 1))
        store.flush()
        store.put(keys_of(numbers)[:3], pages_of(numbers, 2)[:3])
        store.delete(keys_of(numbers)[-1:])
        store.flush()
        if name == "clean":
            store.close()
        else:
            store.namespace.abandon()
    return b"".join(member.data.tobytes() for member in members)


@pytest.mark.parametrize(("version", "checksum"), [(1, "crc32c"), (3, "nh64")])
def test_volume_of_an_older_version_opens_with_every_page(version: int, checksum: str) -> None:
    image = np.frombuffer(
        lzma.decompress((DATA / f"volume_v{version}.xz").read_bytes()), dtype=np.uint8
    ).copy()
    assert image.nbytes == 2 * MEMBER_BYTES
    members = [
        MemoryDevice(
            size_bytes=MEMBER_BYTES, name=f"old{index}", data=image[index * MEMBER_BYTES :][:MEMBER_BYTES]
        )
        for index in range(2)
    ]
    report = check_volume(members)
    assert report.is_ok, report
    deadline = Deadline.after(30)
    volume = Volume.open(members[::-1], deadline=deadline)
    infos = {info.name: info for info in volume.namespaces(deadline=deadline)}
    assert {(info.record.version, info.checksum) for info in infos.values()} == {(version, checksum)}
    assert infos["clean"].is_clean and not infos["crashed"].is_clean
    for name, numbers in (("clean", CLEAN_NUMBERS), ("crashed", CRASHED_NUMBERS)):
        store = PageStore(volume.open_namespace(name, geometry=GEOMETRY, deadline=deadline))
        expected = pages_of(numbers, 1)
        expected[:3] = pages_of(numbers, 2)[:3]
        out = np.zeros_like(expected)
        result = store.get(keys_of(numbers), out)
        assert result.hit_count == len(numbers) - 1 and not result.error_count
        assert np.array_equal(out[:-1], expected[:-1])
        store.put(keys_of(numbers), pages_of(numbers, 3))
        store.close()
    assert check_volume(members).is_ok


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(lzma.compress(build(sys.argv[2]), preset=9))
