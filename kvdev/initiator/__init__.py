"""The userspace NVMe/TCP host."""
