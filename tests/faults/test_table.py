"""The table of FAULTS is complete, and its tests and source lines exist."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.table import CHECKOUT, FOLDER, NUMBERS, Fault, Mutation, read_faults, read_mutations

FAULTS = read_faults()
MUTATIONS = read_mutations()
PRODUCT = ("server/", "deepstream_pipeline/", "deploy/")


@cache
def parsed(file: str) -> ast.Module:
    """The file's syntax tree; empty if it does not exist."""
    path = CHECKOUT / file
    return ast.parse(path.read_text() if path.is_file() else "")


def methods(file: str, class_name: str) -> set[str]:
    """Names of the functions of a class, with those of the base classes that the file imports from tests."""
    found: set[str] = set()
    for node in parsed(file).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            found |= functions(node)
            for base in node.bases:
                found |= methods(file, base.id) if isinstance(base, ast.Name) else set()
        elif isinstance(node, ast.ImportFrom) and class_name in [name.name for name in node.names]:
            found |= methods(f"{(node.module or '').replace('.', '/')}.py", class_name)
    return found


def functions(node: ast.Module | ast.ClassDef) -> set[str]:
    """Names of the functions that a module or a class defines."""
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def is_defined(node_id: str) -> bool:
    """Whether the test exists. node_id: file::function, or file::Class::function."""
    file, *within = node_id.split("::")
    name = within[-1]
    known = functions(parsed(file)) if len(within) == 1 else methods(file, within[0])
    return name.startswith("test_") and name in known


def problems(fault: Fault) -> list[str]:
    """What is missing or wrong in a row."""
    found = [f"{each} does not exist" for each in fault.tests if not is_defined(each)]
    if not fault.fault or not fault.promise:
        found.append("fault or promise is empty")
    if fault.pending:
        return found
    if not fault.tests:
        found.append("it has no test")
    if not fault.mutations:
        found.append("it has no mutation")
    if fault.needs_gpu and not any(each.startswith("tests/gpu/") for each in fault.tests):
        found.append("it needs a GPU and names no test in tests/gpu")
    return found


def mistakes(mutation: Mutation, fault: Fault) -> list[str]:
    """Why a mutation cannot be applied, or would prove nothing."""
    path = CHECKOUT / mutation.file
    found = [] if mutation.file.startswith(PRODUCT) else [f"{mutation.file} is no file of the product"]
    count = path.read_text().count(mutation.old) if path.is_file() else 0
    if count != 1:
        found.append(f"its old text occurs {count} times in {mutation.file}; it must occur once")
    if mutation.new == mutation.old:
        found.append("it changes nothing")
    if mutation.test not in fault.tests:
        found.append(f"{mutation.test} is no test of the row")
    return found


def test_every_row_is_there_exactly_once() -> None:
    """Missing, duplicate and unknown rows are reported."""
    assert [fault.number for fault in FAULTS] == list(NUMBERS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"row-{fault.number}")
def test_row_has_tests_that_exist_and_a_mutation(fault: Fault) -> None:
    """A pending row says what it waits for; the tests that it names must exist nevertheless."""
    assert problems(fault) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_changes_one_place_of_the_product(name: str) -> None:
    """Its old text occurs exactly once, and its test is one of the row's."""
    fault, mutation = MUTATIONS[name]
    assert mistakes(mutation, fault) == []


def test_incomplete_rows_are_found() -> None:
    """Reports rows without test or mutation, tests that do not exist and mutations that cannot be applied."""
    missing = "tests/faults/test_table.py::test_that_does_not_exist"
    assert problems(Fault(1, "a fault", "a promise")) == ["it has no test", "it has no mutation"]
    assert problems(Fault(1, "a fault", "a promise", (missing,), pending="later")) == [f"{missing} does not exist"]
    lost = Mutation(
        "server/penstock/gateway/stack/stack.py", "text that is not there", "text that is not there", missing
    )
    assert len(mistakes(lost, Fault(1, "a fault", "a promise"))) == 3


def test_files_of_rows_are_short_enough_to_read() -> None:
    """Each has at most 400 lines, like every file of the repository."""
    assert all(len(Path(path).read_text().splitlines()) <= 400 for path in FOLDER.glob("*.toml"))
