"""Block devices: the contract, memory, file, RAID0 stripe."""
