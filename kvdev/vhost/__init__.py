"""The vhost-user-blk front end: block devices of another process of this host, on shared memory."""

from kvdev.vhost.device import VhostDevice
from kvdev.vhost.memory import SharedMemory
from kvdev.vhost.options import VhostOptions
from kvdev.vhost.quarantine import Quarantine

__all__ = ["Quarantine", "SharedMemory", "VhostDevice", "VhostOptions"]
