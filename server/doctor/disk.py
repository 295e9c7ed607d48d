"""Disk: room and rights where models, run directories and repositories are."""

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from server.doctor.engine import runs_triton
from server.doctor.finding import GIB, MIB, Finding, Status, shown_bytes
from server.doctor.plan import Plan

HOME_BYTES = GIB  # a few of the catalogue's models
TEMP_BYTES = 64 * MIB  # a run directory is 3 MiB here; downloads and pictures do not go there


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """path: as it was asked for; where it is missing, the rest speaks of its nearest parent. is_noexec: mounted so.

    is_shared: somebody else owns it or may write to it.
    """

    path: Path
    exists: bool
    free_bytes: int
    is_writable: bool
    is_noexec: bool = False
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """models: names of its folders; None where it cannot be read."""

    path: Path
    models: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """run_base: in the folder for temporary files. needs_exec: Triton's programs are to be run from it."""

    home: FolderFacts
    run_base: FolderFacts
    repositories: tuple[RepositoryFacts, ...]
    needs_exec: bool = True


def probe(plan: Plan) -> DiskFacts:
    """Writes and removes an unnamed file in each."""
    return DiskFacts(
        folder_facts(plan.home),
        folder_facts(plan.run_base),
        tuple(_repository(path, plan) for path in plan.repositories),
        needs_exec=runs_triton(plan),
    )


def folder_facts(path: Path) -> FolderFacts:
    """What can be done there, or where it would be made."""
    there = next(
        folder for folder in (path, *path.absolute().parents) if os.path.isdir(folder)
    )  # Path.is_dir raises where it may not look
    status = there.stat()
    return FolderFacts(
        path=path,
        exists=os.path.isdir(path),
        free_bytes=shutil.disk_usage(there).free,
        is_writable=_can_write(there),
        is_noexec=bool(os.statvfs(there).f_flag & os.ST_NOEXEC),
        is_shared=os.path.isdir(path) and (status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)),
    )


def _can_write(folder: Path) -> bool:
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")
        return True
    return False


def _repository(path: Path, plan: Plan) -> RepositoryFacts:
    try:
        names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return RepositoryFacts(path, () if path == plan.home / "models" else None)  # that one `penstock up` makes
    return RepositoryFacts(path, tuple(names))


def findings_of(facts: DiskFacts) -> list[Finding]:
    """Home, the folder for temporary files, the models that are there."""
    return [_home(facts.home), _temp(facts.run_base, facts.needs_exec), _models(facts.repositories)]


def _home(home: FolderFacts) -> Finding:
    found = f"{shown_bytes(home.free_bytes)} free for {home.path}"
    if not home.is_writable:
        advice = "only shipped models are served; choose a folder of yours: PENSTOCK_HOME=DIR"
        return Finding("disk.home", Status.WARNING, f"{home.path} cannot be written to", advice)
    if home.free_bytes < HOME_BYTES:
        return Finding("disk.home", Status.WARNING, found, "make room, or choose another disk: PENSTOCK_HOME=DIR")
    return Finding("disk.home", Status.OK, found if home.exists else f"{found} (not made yet)")


def _temp(base: FolderFacts, needs_exec: bool) -> Finding:
    elsewhere = "choose another folder: TMPDIR=DIR penstock up"
    if base.is_shared:
        found = f"{base.path} belongs to somebody else or others may write to it, and programs are run from it"
        return Finding("disk.temp", Status.PROBLEM, found, f"chmod 700 {base.path}, or {elsewhere}")
    if not base.is_writable:
        return Finding("disk.temp", Status.PROBLEM, f"{base.path} cannot be written to", elsewhere)
    if base.is_noexec and needs_exec:
        found = f"{base.path} is mounted noexec, and Triton's model processes are run from it"
        return Finding("disk.temp", Status.PROBLEM, found, elsewhere)
    found = f"{shown_bytes(base.free_bytes)} free for {base.path}"
    if base.free_bytes < TEMP_BYTES:
        return Finding("disk.temp", Status.WARNING, found, f"make room, or {elsewhere}")
    return Finding("disk.temp", Status.OK, found)


def _models(repositories: tuple[RepositoryFacts, ...]) -> Finding:
    missing = [one.path for one in repositories if one.models is None]
    if missing:
        advice = "give an existing folder: penstock up --model-repository DIR"
        return Finding("disk.models", Status.PROBLEM, f"the model repository {missing[0]} cannot be read", advice)
    names = [name for one in repositories for name in one.models or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        where = [str(one.path / twice[0]) for one in repositories if twice[0] in (one.models or ())]
        found = f"the model {twice[0]} stands in two repositories"
        return Finding("disk.models", Status.PROBLEM, found, f"remove one of {' and '.join(where)}")
    if not names:
        return Finding("disk.models", Status.NOTE, "no model yet", "penstock models pull fastestdet")
    return Finding("disk.models", Status.OK, f"models: {', '.join(sorted(names))}")
