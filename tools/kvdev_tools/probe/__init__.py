"""Device probes in fio's job language: what a device does for a workload, in numbers that compare with fio's.

Here: job files, the run, its output. The engine is in the C core (``kvdev.native.probe``).
"""
