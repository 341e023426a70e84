"""Staging memory: arenas on huge pages, and leases of pages to devices and kernels."""

from kvdev.staging.arena import Arena, Lease
from kvdev.staging.mapping import numa_node_of_pci, numa_nodes

__all__ = ["Arena", "Lease", "numa_node_of_pci", "numa_nodes"]
