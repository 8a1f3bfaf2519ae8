"""Kernel sources from templates, one folder a target, and the tools that build them."""
