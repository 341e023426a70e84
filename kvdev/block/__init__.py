"""Block devices: the contract, and the devices that need no fabric (memory, file, RAID0 stripe).

Not here: NVMe/TCP namespaces (``kvdev.initiator``); what is stored on a device (``kvdev.store``).
"""
