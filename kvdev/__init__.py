"""kvdev: a userland storage-driver toolkit for LLM KV caches.

The driver library. Not here: SPDK's control plane (``spdk_rpc``); page kernels (``kvdev_kernels``); the
command line (``kvdev_tools``).
"""

__version__ = "0.1.0"
