"""Nothing with content is written over by a probe unless it was named for that.

Not here: what is recognised (``kvdev.store.signature``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdev.block.file import FileDevice
from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.store.members import check_unused
from kvdev.store.signature import find_signatures
from kvdev.uri import FileUri, KvNamespaceUri, MemUri, VolumeUri, parse_device_uri
from kvdev_tools.probe.job import Job, is_uri
from kvdev_tools.probe.target import Target, uri_of, wanted_size

SMALLEST_DEVICE_BYTES = 512


def parse_destroy(names: tuple[str, ...]) -> frozenset[str]:
    """``--destroy`` as names to compare: as they are written, and as their devices call themselves."""
    return frozenset(names) | frozenset(_plain(name) for name in names)


def _plain(name: str) -> str:
    if not is_uri(name):
        return f"file:{Path(name).absolute()}"
    if name.startswith("vol"):
        return name
    uri = parse_device_uri(name)
    if isinstance(uri, FileUri):
        return f"file:{uri.path}"
    return f"mem:{uri.name}" if isinstance(uri, MemUri) else str(uri)


def check_read_sizes(jobs: Sequence[Job], destroy: frozenset[str], *, is_read_only: bool) -> None:
    """UsageError when a file would be made, or made larger, that is only to be read.

    Jobs that only read make files that are not there, as fio does, but leave those alone that are.
    """
    written: dict[str, int] = {}
    """What the writing jobs make of each file: others may read that."""
    for job in jobs:
        uri = uri_of(job)
        if isinstance(uri, FileUri) and job.writes:
            written[uri.path] = max(written.get(uri.path, 0), wanted_size(job))
    for job in jobs:
        uri = uri_of(job)
        wanted = wanted_size(job)
        if job.writes or not isinstance(uri, FileUri) or not wanted:
            continue
        path = Path(uri.path)
        if path.exists() and not path.is_file():
            continue
        size = path.stat().st_size if path.exists() else 0
        if size >= wanted:
            continue
        what = f"{job.name}: size: {path} has {size} bytes, expected {wanted}"
        if is_read_only:
            raise UsageError(f"{what}; leave --readonly out or name a smaller size")
        if size and written.get(uri.path, 0) < wanted and f"file:{uri.path}" not in destroy:
            raise UsageError(
                f"{what}; a job that only reads makes it no larger unless --destroy names it: name a smaller size"
            )


def check_growable(job: Job, destroy: frozenset[str], deadline: Deadline) -> None:
    """UsageError when a file that the job would make larger holds something: an image is left as it is."""
    uri = uri_of(job)
    if not isinstance(uri, FileUri) or f"file:{uri.path}" in destroy or not Path(uri.path).is_file():
        return
    wanted = wanted_size(job)
    size = Path(uri.path).stat().st_size
    if size < SMALLEST_DEVICE_BYTES or size >= wanted:
        return
    device = FileDevice(uri.path, block_size_bytes=SMALLEST_DEVICE_BYTES, is_read_only=True)
    try:
        found = find_signatures(device, deadline)
    finally:
        device.close()
    if found:
        raise UsageError(
            f"{job.name}: size: {device.uri} has {size} bytes and holds a {found[0]}; it is made larger to {wanted} "
            f"bytes only when named in --destroy"
        )


def check_writable(job: Job, target: Target, destroy: frozenset[str], deadline: Deadline) -> None:
    """UsageError when a job would write to what holds a volume, table, file system, md or LVM, or is in use."""
    if not job.writes:
        return
    uri = uri_of(job)
    if isinstance(uri, (VolumeUri, KvNamespaceUri)):
        if str(uri) not in destroy and job.filename not in destroy:
            raise UsageError(
                f"{job.name}: {uri}: is a volume, which rw={job.rw.name} would overwrite; name it in --destroy"
            )
        return
    for device in target.devices:
        is_named = device.uri in destroy or job.filename in destroy or str(uri) in destroy
        named = frozenset({device.uri}) if is_named else frozenset()
        try:
            check_unused([device], named, deadline)
        except UsageError as error:
            raise UsageError(f"{job.name}: rw={job.rw.name}: {error}") from None
