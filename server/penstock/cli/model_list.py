"""The rows of `penstock models list`, and the lookup of models on this machine for other commands."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from penstock.cli.gateway_client import GatewayClient
from penstock.cli.terminal import fail, one_line
from penstock.gateway.batching.options import DeclaredOptions
from penstock.gateway.settings import SHIPPED_MODELS, Settings
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.models.catalogue import (
    RANDOM_WEIGHTS,
    CatalogueEntry,
    CatalogueError,
    InstalledModel,
    read_catalogue,
    read_folder,
    scan,
)
from penstock.protocol.batch_reports import ModelBatchReport
from penstock.protocol.engine import ModelState
from penstock.protocol.errors import GatewayUnreachable, InferenceError
from penstock.protocol.inference import BatchOwner
from penstock.protocol.model_reports import RunsOn

NOT_LOADED = "not loaded"
RANDOM_TEXT = "random weights: its speed can be measured, its answers mean nothing"
UNTRIED_TEXT = "untried: this project has never decoded the real weights of"
_STACK = re.compile(r"\s+At:\s")


class ModelRow(msgspec.Struct, frozen=True):
    """where: shipped, home, catalogue (not pulled), gateway (not on this machine), or the repository's path.

    state: as the gateway reports it (READY, UNAVAILABLE, …), `not loaded`, or None if no gateway answers.
    reason: why it is not served. owner: who forms batches: gateway, triton, off, or empty where that is not known.
    licence: the catalogue's for its own model, else MODEL.md's; empty where that says none. size_bytes: of the files of
    the versions that are served, of the highest where none is; of the catalogue's file before it is pulled.
    unmerged: why each request and picture goes to the engine alone, as reported by the gateway; else empty.
    weights: `random` for a model that is there to be measured and whose answers mean nothing, else empty.
    untried: whether it is the catalogue's and this project has never decoded its real weights. runs_on: device,
    precision and CUDA graphs, as the gateway reports it; null where that is not known.
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
    untried: bool = False
    runs_on: RunsOn | None = None


def model_rows(
    *,
    installed: Sequence[InstalledModel],
    home_repository: Path,
    catalogue: Mapping[str, CatalogueEntry],
    index: Sequence[ModelState] | None,
    is_batching: bool = True,
    batches: Mapping[str, ModelBatchReport] | None = None,
    runs_on: Mapping[str, RunsOn] | None = None,
) -> list[ModelRow]:
    """One row a model and place.

    index: None if no gateway answers. is_batching: whether the running engine forms batches. batches: reports of the
    gateway on served models; they override the files. runs_on: as the gateway reports it.
    """
    states = _ModelStates(index)
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
    if runs_on:
        rows = [msgspec.structs.replace(row, runs_on=runs_on.get(row.name)) for row in rows]
    return [_explained(row, batches[row.name]) if batches and row.name in batches else row for row in rows]


def model_table(rows: Sequence[ModelRow]) -> Table:
    """The table, without the reasons, which are too long for a column. Names do not wrap."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("model", no_wrap=True, min_width=max((len(one_line(row.name)) for row in rows), default=0))
    for name in ("where", "version", "state", "owner"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("licence", overflow="fold")
    for row in rows:
        cells = (row.name, row.where, " ".join(row.versions) or "-", row.state or "?", row.owner or "?")
        texts = [Text(one_line(cell)) for cell in (*cells, row.licence or "-")]
        table.add_row(*texts[:-1], _size(row.size_bytes), texts[-1])
    return table


def reason_lines(rows: Sequence[ModelRow]) -> list[str]:
    """The untried models, then lines for those not served, those not merged, where each runs, and random weights."""
    untried = [row.name for row in rows if row.untried]
    reasons = textwrap.wrap(f"{UNTRIED_TEXT} {', '.join(untried)}", 80, break_on_hyphens=False) if untried else []
    reasons += [f"{row.name}: {in_short(row.reason)}" for row in rows if row.reason]
    alone = "each request and picture goes to the engine alone"
    reasons += [f"{row.name}: {alone}: {row.unmerged}" for row in rows if row.unmerged]
    reasons += [f"{row.name}: {placed}" for row in rows if row.runs_on and (placed := _placed(row.runs_on))]
    on_cpu = [row.name for row in rows if row.runs_on and not row.runs_on.is_on_gpu]
    reasons += textwrap.wrap(f"on the CPU: {', '.join(on_cpu)}", 80, break_on_hyphens=False) if on_cpu else []
    reasons += [f"{row.name}: {RANDOM_TEXT}" for row in rows if row.weights == RANDOM_WEIGHTS]
    return list(map(one_line, reasons))


def _placed(runs_on: RunsOn) -> str:
    """Empty for a model on the CPU that was not meant for a GPU."""
    device = [f"runs on {runs_on.text}"] if runs_on.is_on_gpu else []
    return "; ".join([*device, *runs_on.fallbacks])


def in_short(reason: str) -> str:
    """Triton's reason in one line, without the interpreter's stack that it appends for a Python model."""
    return one_line(_STACK.split(reason)[0])


class _ModelStates:
    """The gateway's index, by model."""

    def __init__(self, index: Sequence[ModelState] | None) -> None:
        self._is_known = index is not None
        self._rows: dict[str, list[ModelState]] = {}
        for row in index or ():
            self._rows.setdefault(row.name, []).append(row)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._rows)

    def versions(self, name: str) -> tuple[str, ...]:
        return tuple(row.version for row in self._rows.get(name, ()) if row.version)

    def state(self, name: str) -> str | None:
        """READY if any version is; None if no gateway answers."""
        if not self._is_known:
            return None
        states = [row.state for row in self._rows.get(name, ()) if row.state]
        return "READY" if "READY" in states else next(iter(states), NOT_LOADED)

    def ready_versions(self, name: str) -> tuple[str, ...]:
        return tuple(row.version for row in self._rows.get(name, ()) if row.state == "READY")

    def reason(self, name: str) -> str:
        """The gateway's reasons for the versions that are not served."""
        return "; ".join(dict.fromkeys(row.reason for row in self._rows.get(name, ()) if row.reason))


def _installed_row(
    model: InstalledModel, home_repository: Path, states: _ModelStates, entry: CatalogueEntry | None
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
        untried=entry is not None and is_pulled and entry.untried,
    )


def _served_bytes(model: InstalledModel, ready_versions: tuple[str, ...]) -> int | None:
    """None for a folder without a version."""
    served = [version for version in ready_versions if version in model.sizes_bytes] or model.versions[-1:]
    return sum(model.sizes_bytes[version] for version in served) if served else None


def _explained(row: ModelRow, page: ModelBatchReport) -> ModelRow:
    return msgspec.structs.replace(row, owner=page.owner, unmerged=page.unmerged)


def _without_batches(row: ModelRow) -> ModelRow:
    return msgspec.structs.replace(row, owner=BatchOwner.OFF) if row.owner == BatchOwner.TRITON else row


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
        untried=entry.untried,
    )


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def _where(repository: Path, home_repository: Path) -> str:
    if repository == home_repository:
        return "home"
    return "shipped" if repository == SHIPPED_MODELS else str(repository)


NOT_FOUND = ("failed to poll from model repository", "it is not in the engine's model repository")  # the two engines'


def installed_models(settings: Settings) -> list[InstalledModel]:
    """By repository and name. Ends the command if a repository cannot be read."""
    try:
        return scan(settings.repositories, DeclaredOptions(settings.batching))
    except CatalogueError as error:
        fail(str(error), code=1)


def complete_model(incomplete: str) -> list[str]:
    """For a shell: models of this machine's repositories whose names begin so. Asks no gateway, which is slow."""
    with suppress(SettingsError, OSError):
        folders = [
            file.parent for repository in read_settings({}).repositories for file in repository.glob("*/config.pbtxt")
        ]
        return sorted({folder.name for folder in folders if folder.name.startswith(incomplete)})
    return []


def unknown_model(name: str, known: Iterable[str], where: str, *, url: str = "") -> str:
    """That there is no such model, with the names that are close, or how to get it, or where to look.

    url: of the gateway that has no such model; empty for the models of this machine.
    """
    names = set(known)
    close = difflib.get_close_matches(name, names, n=3) or sorted(each for each in names if each.startswith(name))[:3]
    if name in read_catalogue():
        hint = f": fetch it with `penstock models pull {name}`"
    elif close:
        hint = f": did you mean {' or '.join(close)}?"
    else:
        hint = f"; `penstock models list{f' --url {url}' if url else ''}` shows what there is"
    return f"there is no model {name!r} {where}{hint}"


def load_where_one_runs(name: str, gateway: GatewayClient, settings: Settings) -> str:
    """Into the running gateway, where there is one; what became of it. Raises InferenceError where that failed."""
    try:
        gateway.load(name)
    except GatewayUnreachable:
        return f"no gateway runs at {gateway.url}: {name} will be loaded at the next `penstock up`"
    except InferenceError as error:
        why = load_failure(name, str(error), settings)
        raise InferenceError(f"{name} is in place, but the gateway at {gateway.url} did not load it: {why}") from error
    return f"{name} is loaded at {gateway.url}: penstock infer {name} photo.jpg"


def load_failure(name: str, refusal: str, settings: Settings) -> str:
    """The refusal, and where the engine found no such model or could not read it, what this machine's folders tell."""
    if not any(text in refusal for text in NOT_FOUND):
        return in_short(refusal)
    models = installed_models(settings)
    found = [model for model in models if model.name == name]
    if not found:
        where = f"in {' or '.join(map(str, settings.repositories))}"
        return f"{refusal}: {unknown_model(name, (model.name for model in models), where)}"
    return ": ".join(filter(None, (refusal, found[0].problem)))
