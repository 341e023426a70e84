"""Staging memory: arenas and leases."""
