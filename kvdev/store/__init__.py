"""The KV page store: volumes over block devices, KV namespaces on them, pages in those.

Not here: the devices (``kvdev.block``, ``kvdev.initiator``); memory for pages (``kvdev.staging``).
"""
