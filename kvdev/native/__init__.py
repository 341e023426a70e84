"""Typed calls into the C core; the only importer of ``kvdev._core``.

Not here: decisions. One module per C object: arrays (``io``), checksums (``crc``), and so on.
"""
