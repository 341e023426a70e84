"""Staging memory: arenas on huge pages, and leases of pages to devices and kernels."""

from kvdev.staging.arena import Arena, Lease

__all__ = ["Arena", "Lease"]
