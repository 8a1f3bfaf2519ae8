"""Loads and runs artifacts, without torch."""
