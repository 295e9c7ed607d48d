"""Processes of one gateway: the core, its worker processes and client processes, and the memory that they share."""
