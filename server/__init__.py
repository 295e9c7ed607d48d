"""Penstock's gateway and its command line."""

VERSION = "0.1.0"  # as pyproject.toml has it
