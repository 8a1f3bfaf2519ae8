"""Devices: memory, program execution. One file a device; nothing else knows how to run a plan."""
