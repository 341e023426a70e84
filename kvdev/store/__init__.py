"""Volumes, KV namespaces and the page store."""
