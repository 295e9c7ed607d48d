"""`penstock models add` and `penstock models remove`: adds model files to the repository in PENSTOCK_HOME."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.cli.gateway_client import (
    DEFAULT_HTTP_PORT,
    ApiKey,
    GatewayClient,
    Url,
    gateway_of,
    settings_or_fail,
    url_of,
)
from penstock.cli.model_flags import AllowsCode, ModelFlags, check_file_name, with_model_flags
from penstock.cli.model_list import load_failure
from penstock.cli.terminal import (
    AsJson,
    fail,
    print_failure,
    print_json,
    printable,
    program_name,
    progress_bar,
    stoppable,
)
from penstock.engines.ort_serving.placement import Precision
from penstock.gateway.settings import Settings
from penstock.gpu.tensorrt import Accelerator
from penstock.logs import LogFormat, configure_logs
from penstock.models.catalogue import CatalogueError, read_folder
from penstock.models.model_folder import is_disk_full, repository_of
from penstock.models.placement.choice import Device, PlacementChoice, PlacementWish, unfulfillable
from penstock.protocol.errors import GatewayUnreachable, InferenceError
from penstock.protocol.model_addition import AddFailure, ModelAdded, OpenQuestion

if TYPE_CHECKING:  # they import ONNX Runtime, which other commands of the group do not need
    from penstock.models.add import AddedModel, AddOptions

_DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_HTTP_PORT}"
Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE…", help="ONNX or .pt2 files, folders of ONNX files, or Triton model folders"),
]
Name = Annotated[str, typer.Option("--name", help="the model's name [from the file's]")]
Home = Annotated[Path | None, typer.Option(help="folder for added models [~/.penstock]", show_default=False)]


class AddReport(ModelAdded, kw_only=True):
    """One added model. state: in the running gateway, or why not loaded.

    rows_per_s: rate of the network on one core, by batch size. golden: whether a golden answer was recorded.
    batch_error: the engine's message if a batch did not run. placement: where it runs and the trials; null if only the
    engine decides that.
    """

    folder: str
    batch_error: str
    placement: PlacementChoice | None
    rows_per_s: dict[int, float]
    golden: bool


@dataclass(frozen=True, slots=True)
class AddContext:
    """Options of one command, and the console for its reports."""

    settings: Settings
    options: "AddOptions"
    console: Console
    url: str = ""  # of the gateway that will serve it; empty for the default
    is_serving: bool = False  # `penstock serve`, whose stack prints its own addresses


@with_model_flags
def add(
    files: Files,
    name: Name = "",
    replace: Annotated[bool, typer.Option("--replace", help="replace a model that was added before")] = False,
    load: Annotated[bool, typer.Option("--load/--no-load", help="load it into the running gateway")] = True,
    allow_model_code: AllowsCode = False,
    url: Url = None,
    api_key: ApiKey = "",
    home: Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="print only JSON, one object per model")] = False,
    on: Annotated[
        Device | None,
        typer.Option("--on", help="device that runs the model [the GPU if it is faster and gives the same answers]"),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(
            metavar="fp32|tf32|fp16", help="precision on the GPU [fp16 if it is faster and gives the same answers]"
        ),
    ] = None,
    origin: Annotated[str, typer.Option(hidden=True, help="origin of the file, for MODEL.md [its path]")] = "",
    accelerator: Annotated[
        Accelerator | None,
        typer.Option(help="use TensorRT in NGC's Triton; never run there (docs/gpu.md)", show_default=False),
    ] = None,
    accelerator_cache: Annotated[
        str, typer.Option(metavar="DIR", help="folder for TensorRT engines, as Triton sees it [in the model's folder]")
    ] = "",
    flags: ModelFlags = ModelFlags(),  # noqa: B008 - replaced by its fields
) -> None:
    """Add model files: recognise the layout, test batching, write the model's folder, and load it.

    If a file is ambiguous, the message names the flag to add. `penstock models inspect FILE` shows the findings.
    """
    from penstock.models.add import AddOptions

    wish = PlacementWish(on, precision)
    if why := unfulfillable(wish):
        fail(why)
    options = AddOptions(
        flags.hints(),
        flags.pictures(),
        may_replace=replace,
        allows_code=allow_model_code,
        origin=origin,
        wish=wish,
        accelerator=accelerator,
        accelerator_cache=accelerator_cache,
    )
    settings = settings_or_fail(home)
    gateway = gateway_of(url, api_key) if load else None
    shown_url = gateway.url if gateway is not None else url or url_of(settings)
    place = AddContext(settings, options, Console(stderr=as_json, highlight=False), shown_url)
    sources = sources_of(files, name)
    is_complete = True
    with stoppable("the unfinished model is removed", runs_models=True):
        for source, model_name in sources:
            is_complete = add_one(place, source, model_name, gateway, as_json) and is_complete
    if not is_complete:
        raise typer.Exit(1)


def remove(
    name: Annotated[str, typer.Argument(help="a model that was added or pulled")],
    url: Url = None,
    api_key: ApiKey = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Unload a model from the running gateway, and remove its folder."""
    from penstock.models.add import check_name, remove_model

    settings = settings_or_fail(home)
    gateway, folder = gateway_of(url, api_key), repository_of(settings.home_path) / name
    was_served = False
    try:
        check_name(name)
        if not folder.exists():  # a removal without this gateway's address leaves the model loaded
            was_served = any((row.name, row.state) == (name, "READY") for row in gateway.repository_index())
        gateway.unload(name)
    except GatewayUnreachable:
        print_failure(f"no gateway runs at {gateway.url}: if one elsewhere serves {name}, give its --url")
    except CatalogueError as error:
        fail(str(error), code=1)
    except InferenceError as error:
        print_failure(f"{name} is not unloaded at {gateway.url}: {error}")
    removed = None
    try:
        removed = remove_model(name, home=settings.home_path)
    except CatalogueError as error:
        if not was_served:
            fail(str(error), code=1)
    if as_json:
        print_json({"model": name, "folder": removed and str(removed)})
    elif removed:
        typer.echo(f"removed {removed}")
    else:
        typer.echo(f"{name} is unloaded at {gateway.url}; it has no folder in {folder.parent}")


def sources_of(files: list[Path], name: str) -> list[tuple[Path, str]]:
    """(file, model name) of each model. Ends the command if there is no file, or if two models have one name."""
    from penstock.models.add import name_from
    from penstock.models.triton_folder import is_model_folder

    found: list[Path] = []
    for path in files:
        check_file_name(path)
        if is_model_folder(path):
            found.append(path)
        elif path.is_dir():
            inside = sorted(path.glob("*.onnx"))
            if not inside:
                fail(f"{path} has no .onnx file and is not a Triton model folder: give another folder or a file")
            found += inside
        elif not path.exists():
            fail(f"there is no file {path}")
        else:
            found.append(path)
    if name and len(found) > 1:
        fail(f"--name {name!r} is for one model, and there are {len(found)} files")
    named = [(path, name or name_from(path)) for path in found]
    for path, own in named:
        twin = next((other for other, other_name in named if other_name == own and other is not path), None)
        if twin is not None:
            fail(f"{path} and {twin} would both be the model {own!r}: add one of them with --name")
    return named


def add_one(place: AddContext, source: Path, name: str, gateway: GatewayClient | None, as_json: bool) -> bool:
    """Adds one model and prints the report. Returns False if it was not added, or if the gateway did not load it."""
    from penstock.cli.inspect import question_text
    from penstock.models.add import NotServable, add_model

    settings = place.settings
    try:
        with progress_bar() as bar:
            task = bar.add_task(name, total=None)
            added = add_model(
                source,
                name,
                place.options,
                home=settings.home_path,
                other_repositories=settings.repositories,
                on_stage=lambda stage: bar.update(task, description=f"{name}: {stage}"),
            )
            bar.update(task, description=f"{name}: recording a golden answer")
            problem = _record(added)
    except CatalogueError as error:
        questions = error.inspection.recognition.questions if isinstance(error, NotServable) else ()
        print_failure(f"{source} was not added: {error}")
        for question in [question for question in questions if question.is_blocking][1:]:  # the first is the error's
            print_failure(question_text(question))
        if as_json:
            open_questions = tuple(OpenQuestion(each.flag, each.choices, each.ambiguous) for each in questions)
            is_full = isinstance(error.__cause__, OSError) and is_disk_full(error.__cause__)
            print_json(AddFailure(name, str(error), open_questions, is_full))
        return False
    state, is_loaded = _load(name, gateway, settings)
    report = _report(added, problem, state)
    if as_json:
        print_json(report)
    else:
        _print(report, place, is_loaded=is_loaded)
    return is_loaded


def _record(added: "AddedModel") -> str:
    """Records golden.json for `models check`. Returns the reason if it fails, or ""."""
    if added.inspection.facts.file_format.is_torch:
        return (
            "no golden answer was recorded, as only Triton runs it; `penstock models check NAME --record` records one"
        )
    import onnxruntime as ort

    from penstock.cli.check_request import CheckContext, NotCheckable
    from penstock.cli.check_result import record_golden
    from penstock.engines.ort_serving.session import SEVERITY_FATAL
    from penstock.models.check.golden import GoldenError

    configure_logs(LogFormat.TEXT, "error")
    ort.set_default_logger_severity(SEVERITY_FATAL)  # the reasons are in the report
    model = read_folder(added.folder)
    try:
        asyncio.run(record_golden(model, CheckContext(GatewayClient(""), None, {})))
    except (GoldenError, InferenceError, NotCheckable) as error:
        return f"no golden answer was recorded for `models check`: {error}"
    return ""


def _load(name: str, gateway: GatewayClient | None, settings: Settings) -> tuple[str, bool]:
    """(state of the model, whether it is as requested)."""
    if gateway is None:
        return "not loaded", True
    try:
        gateway.load(name)
    except GatewayUnreachable:
        return f"no gateway runs at {gateway.url}: it will be loaded at the next `penstock up`", True
    except InferenceError as error:
        why = load_failure(name, str(error), settings)
        return f"added, but not loaded: the gateway at {gateway.url} did not load it: {why}", False
    return f"loaded at {gateway.url}", True


def _report(added: "AddedModel", problem: str, state: str) -> AddReport:
    from penstock.cli.inspect import question_text

    recognition, trial = added.inspection.recognition, added.inspection.trial
    return AddReport(
        name=added.name,
        folder=str(added.folder),
        layout=recognition.layout,
        max_batch_size=added.batches.max_rows,
        batches=added.batches.why,
        batch_error=added.batches.error,
        placement=added.placement,
        placement_reason=added.placement.why if added.placement is not None else "",
        evidence=(*recognition.evidence, *trial.evidence),
        warnings=(
            *(f"assumed: {sentence}" for sentence in recognition.assumptions),
            *recognition.warnings,
            *trial.warnings,
            *map(question_text, recognition.questions),
            *added.notes,
            *filter(None, (problem,)),
        ),
        rows_per_s={rows: round(rate, 1) for rows, rate in added.batches.rows_per_s},
        golden=(added.folder / "golden.json").exists(),
        state=state,
    )


def _print(report: AddReport, place: AddContext, *, is_loaded: bool) -> None:
    """is_loaded: whether the printed commands can answer, now or after the next `penstock up`."""

    def line(text: str) -> None:
        place.console.print(printable(text), markup=False, soft_wrap=True)

    line(f"{report.name}: {report.layout}, in {report.folder}")
    for sentence in report.evidence:
        line(f"  because {sentence}")
    if report.rows_per_s:
        fastest = max(report.rows_per_s, key=lambda rows: report.rows_per_s[rows])
        line(f"  speed: {report.rows_per_s[fastest]:.0f} pictures/s on one core, {fastest} per call")
    rows = f"up to {report.max_batch_size} pictures per call" if report.max_batch_size else "one picture per call"
    line(f"  batches: {rows}; {report.batches}")
    if report.placement_reason:
        line(f"  {report.placement_reason}")
    for sentence in report.warnings:
        line(f"  note: {sentence}")
    if not place.is_serving:
        line(f"  {report.state}")
    url = place.url or _DEFAULT_URL
    elsewhere = "" if url == _DEFAULT_URL else f" --url {url}"
    line("")
    program = program_name(Path(sys.argv[0]))
    if not is_loaded:
        line(f"  {program} models load {report.name}{elsewhere}")
        return
    line(f"  {program} infer {report.name} photo.jpg --draw out.jpg{elsewhere}")
    target = f"{url}/v2/models/{report.name}/image"
    line(f"  curl --data-binary @photo.jpg -H 'content-type: image/jpeg' {target}")
    request = f"u.Request('{target}', open('photo.jpg', 'rb'), {{'content-type': 'image/jpeg'}})"
    line(f'  python -c "import urllib.request as u; print(u.urlopen({request}).read().decode())"')
