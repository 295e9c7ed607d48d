"""Processes of one gateway: the core, its worker and client processes, and the memory that they share."""
