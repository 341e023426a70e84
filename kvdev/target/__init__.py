"""The embedded NVMe/TCP target and the SPDK-compatible RPC server that configures it."""
