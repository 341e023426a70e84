"""Secrets and what is computed from them: no sockets, no commands; both roles use it."""
