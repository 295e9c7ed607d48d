"""The rows of `penstock models list`: folders, catalogue and running gateway brought together by name."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from server.batching.page import ModelExplained
from server.catalogue.catalogue import CatalogueEntry
from server.catalogue.installed import RANDOM_WEIGHTS, InstalledModel, read_folder
from server.commands.gateway import IndexRow
from server.commands.terminal import one_line
from server.core.batching import Owner
from server.settings import CHECKOUT

NOT_LOADED = "not loaded"
RANDOM_TEXT = "random weights: its speed can be measured, its answers mean nothing"
_STACK = re.compile(r"\s+At:\s")


class ModelRow(msgspec.Struct, frozen=True):
    """where: shipped, home, catalogue (not pulled), gateway (not on this machine), or the repository's path.

    state: the gateway's word (READY, UNAVAILABLE, …), `not loaded`, or None where no gateway answers.
    reason: why it is not served. owner: who forms batches: gateway, triton, off, or empty where that is not known.
    licence: the catalogue's for its own model, else MODEL.md's; empty where that says none. size_bytes: of the files of
    the versions that are served, of the highest where none is; of the catalogue's file before it is pulled.
    unmerged: why each request and picture goes to the engine alone, as reported by the gateway; else empty.
    weights: `random` for a model that is there to be measured and whose answers mean nothing, else empty.
    """

    name: str
    where: str
    versions: tuple[str, ...]
    state: str | None
    reason: str
    owner: str
    licence: str = ""
    size_bytes: int | None = None
    weights: str = ""
    unmerged: str = ""


def model_rows(
    *,
    installed: Sequence[InstalledModel],
    home_repository: Path,
    catalogue: Mapping[str, CatalogueEntry],
    index: Sequence[IndexRow] | None,
    is_batching: bool = True,
    batches: Mapping[str, ModelExplained] | None = None,
) -> list[ModelRow]:
    """One row a model and place.

    index: None where no gateway answers. is_batching: whether the engine that runs forms batches. batches: of models
    that are served, as the gateway explains them, which is believed rather than a file.
    """
    states = _States(index)
    rows = [_installed_row(model, home_repository, states, catalogue.get(model.name)) for model in installed]
    here = {model.name for model in installed}
    rows += [
        ModelRow(row_name, "gateway", states.versions(row_name), states.state(row_name), states.reason(row_name), "")
        for row_name in states.names
        if row_name not in here
    ]
    rows += [
        _catalogue_row(entry, is_known=index is not None)
        for name, entry in catalogue.items()
        if name not in here and name not in states.names
    ]
    rows = rows if is_batching else [_without_batches(row) for row in rows]
    return [_explained(row, batches[row.name]) if batches and row.name in batches else row for row in rows]


def model_table(rows: Sequence[ModelRow]) -> Table:
    """The rows for a person, without the reasons, which are too long for a column. A name is never folded."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("model", no_wrap=True, min_width=max((len(row.name) for row in rows), default=0))
    for name in ("where", "version", "state", "owner"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("licence", overflow="fold")
    for row in rows:
        cells = (row.name, row.where, " ".join(row.versions) or "-", row.state or "?", row.owner or "?")
        table.add_row(*map(escape, cells), _size(row.size_bytes), escape(row.licence) or "-")
    return table


def reason_lines(rows: Sequence[ModelRow]) -> list[str]:
    """One line for each model that is not served, whose requests are not merged, or that has random weights."""
    reasons = [f"{row.name}: {in_short(row.reason)}" for row in rows if row.reason]
    alone = "each request and picture goes to the engine alone"
    reasons += [f"{row.name}: {alone}: {row.unmerged}" for row in rows if row.unmerged]
    return reasons + [f"{row.name}: {RANDOM_TEXT}" for row in rows if row.weights == RANDOM_WEIGHTS]


def in_short(reason: str) -> str:
    """Triton's reason in one line, without the interpreter's stack that it appends for a Python model."""
    return one_line(_STACK.split(reason)[0])


class _States:
    """The gateway's index, by model."""

    def __init__(self, index: Sequence[IndexRow] | None) -> None:
        self._is_known = index is not None
        self._rows: dict[str, list[IndexRow]] = {}
        for row in index or ():
            self._rows.setdefault(row.name, []).append(row)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._rows)

    def versions(self, name: str) -> tuple[str, ...]:
        return tuple(row.version for row in self._rows.get(name, ()) if row.version)

    def state(self, name: str) -> str | None:
        """READY where any version is; None where no gateway answers."""
        if not self._is_known:
            return None
        states = [row.state for row in self._rows.get(name, ()) if row.state]
        return "READY" if "READY" in states else next(iter(states), NOT_LOADED)

    def ready_versions(self, name: str) -> tuple[str, ...]:
        return tuple(row.version for row in self._rows.get(name, ()) if row.state == "READY")

    def reason(self, name: str) -> str:
        """What the gateway says of the versions that are not served."""
        return "; ".join(dict.fromkeys(row.reason for row in self._rows.get(name, ()) if row.reason))


def _installed_row(
    model: InstalledModel, home_repository: Path, states: _States, entry: CatalogueEntry | None
) -> ModelRow:
    is_pulled = entry is not None and model.repository == home_repository
    return ModelRow(
        model.name,
        _where(model.repository, home_repository),
        model.versions,
        states.state(model.name),
        model.problem or states.reason(model.name),
        model.owner or "",
        licence=entry.licence if entry is not None and is_pulled else model.licence,
        size_bytes=_served_bytes(model, states.ready_versions(model.name)),
        weights=RANDOM_WEIGHTS if model.has_random_weights else "",
    )


def _served_bytes(model: InstalledModel, ready_versions: tuple[str, ...]) -> int | None:
    """None for a folder without a version."""
    served = [version for version in ready_versions if version in model.sizes_bytes] or model.versions[-1:]
    return sum(model.sizes_bytes[version] for version in served) if served else None


def _explained(row: ModelRow, page: ModelExplained) -> ModelRow:
    return msgspec.structs.replace(row, owner=page.owner, unmerged=page.unmerged)


def _without_batches(row: ModelRow) -> ModelRow:
    return msgspec.structs.replace(row, owner=Owner.OFF) if row.owner == Owner.TRITON else row


def _catalogue_row(entry: CatalogueEntry, *, is_known: bool) -> ModelRow:
    return ModelRow(
        entry.name,
        "catalogue",
        (),
        NOT_LOADED if is_known else None,
        "",
        read_folder(entry.folder).owner or "",
        licence=entry.licence,
        size_bytes=entry.size_bytes,
    )


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def _where(repository: Path, home_repository: Path) -> str:
    if repository == home_repository:
        return "home"
    return "shipped" if repository == CHECKOUT / "model_repository" else str(repository)
