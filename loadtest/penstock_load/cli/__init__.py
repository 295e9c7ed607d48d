"""The commands of `penstock load`."""

from penstock.cli import Command

LOAD = Command(
    "penstock_load.cli.commands",
    "app",
    "Run load tests with a verdict against documented targets.",
    extra="load",
    needs=("jinja2", "locust", "matplotlib"),
)
