"""Packages that the client imports, checked in a new process."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{statement}
third_party = {{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names
print(*sorted(third_party))
"""
INSTALLATION = {"__main__", "__mp_main__", "_distutils_hack", "_virtualenv", "penstock"}
URLLIB3 = {"urllib3", "_brotli", "brotli", "brotlicffi", "zstandard", "backports", "h2"}  # and what it finds installed


def third_party(statement: str) -> set[str]:
    """Packages that the statement loads, except the standard library and Penstock."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(statement=statement)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(done.stdout.split()) - INSTALLATION


def test_import_of_the_package_loads_nothing() -> None:
    """`import penstock` loads no other package and no module of the client."""
    assert third_party("import penstock; assert 'penstock.client' not in sys.modules") == set()


def test_client_loads_numpy_and_the_http_library() -> None:
    """gRPC, OpenCV, pandas and web frameworks are not loaded; AsyncClient loads aiohttp on first use."""
    loaded = third_party("from penstock import Client")
    assert {"numpy", "urllib3"} <= loaded
    assert loaded - URLLIB3 == {"numpy"}
    assert third_party("from penstock import AsyncClient") == {"numpy"}


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    """`penstock.no_such_name` raises AttributeError."""
    import penstock

    with pytest.raises(AttributeError, match="'penstock' has no attribute 'Clint'"):
        penstock.Clint  # noqa: B018
