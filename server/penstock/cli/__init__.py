"""The command line: one module for each command group, and what the commands of all programs share."""
