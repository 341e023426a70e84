"""Bytes in, bytes out, no I/O: PDUs, SQE and CQE, Identify, Fabrics, log pages.

Spec: NVMe/TCP Transport 1.0, Base 2.2, NVM Command Set 1.0.
"""
