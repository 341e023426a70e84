"""SPDK control plane: JSON-RPC framing, client, typed methods. Standard library only."""
