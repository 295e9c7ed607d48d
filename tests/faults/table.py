"""The table of FAULTS: for each row its promise, the tests that hold it, and changes of the product that break it.

The rows stand in the TOML files beside this module. `test_table.py` checks them, `tests/long/test_mutations.py` makes
each change in a copy of the checkout and expects the row's test to fail.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CHECKOUT = FOLDER.parents[1]
NUMBERS = range(1, 100)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of the product that breaks a promise.

    file: relative to the checkout. old: text that occurs exactly once in it. test: pytest node ID of the test that
    must fail with the change.
    """

    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A row. tests: pytest node IDs.

    needs_gpu: its tests are in tests/gpu and need a GPU; other named tests check the decisions.
    pending: why tests or mutation are missing, or what is not built yet; empty for a complete row.
    remark: what a test cannot show, or how the fault is simulated.
    """

    number: int
    fault: str
    promise: str
    tests: tuple[str, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    needs_gpu: bool = False
    pending: str = ""
    remark: str = ""


def read_faults(folder: Path = FOLDER) -> list[Fault]:
    """Every row of the TOML files in the folder, by number. Unknown keys raise TypeError."""
    faults = []
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text())["fault"]:
            mutations = tuple(Mutation(**each) for each in row.pop("mutations", ()))
            tests = tuple(row.pop("tests", ()))
            faults.append(Fault(**row, tests=tests, mutations=mutations))
    return sorted(faults, key=lambda fault: fault.number)


def read_mutations(folder: Path = FOLDER) -> dict[str, tuple[Fault, Mutation]]:
    """Every mutation with its row, by a name for it: "row-12.1" is the first one of row 12."""
    return {
        f"row-{fault.number}.{number}": (fault, mutation)
        for fault in read_faults(folder)
        for number, mutation in enumerate(fault.mutations, start=1)
    }
