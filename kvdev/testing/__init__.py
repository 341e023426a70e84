"""Shipped fakes: scripted peer, crash device, simulated clock."""
