"""Command-line options that the `penstock load` commands share, and their validation."""

import math
import re
import shlex
import sys
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from penstock.cli.terminal import fail
from penstock.engines.call_options import EngineHeaders, HeaderFileError, read_header_file
from penstock_load import scenario as overrides
from penstock_load.clients.client import Endpoint, without_user
from penstock_load.driver.protocol import read_recording
from penstock_load.hardware import checkout_commit
from penstock_load.measure.run_folder import RECORDS_FILE, RUN_FILE
from penstock_load.scenario import Scenario, ScenarioError, read_scenario
from penstock_load.targets import Target, TargetsError, read_targets, scenario_targets, slo_targets

Name = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="a name of `penstock load scenarios`, or a .toml of yours")
]
TargetUrl = Annotated[
    str | None, typer.Option("--target", help="the server under test [http://127.0.0.1:8000]", show_default=False)
]
GrpcAddress = Annotated[str, typer.Option("--grpc", metavar="HOST:PORT", help="its gRPC [one port above --target's]")]
Model = Annotated[str, typer.Option(help="ask this model instead of the scenario's")]
Images = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="pictures to post instead of generated ones")
]
ImagePath = Annotated[str, typer.Option(help="where pictures are posted; {model} stands for the model")]
Stream = Annotated[str, typer.Option("--stream", metavar="URI", help="what each stream of video-streams plays")]
Replay = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="send when this recording says (records.jsonl)")
]
Header = Annotated[list[str] | None, typer.Option("--header", metavar="'NAME: VALUE'", help="goes with every request")]
BesideHeaderFile = Annotated[
    Path | None, typer.Option(help="file with headers (NAME: VALUE lines) for requests to the server of --beside only")
]
SloP99 = Annotated[float | None, typer.Option("--slo-p99-ms", help="another SLO than the scenario's")]
MinRate = Annotated[float | None, typer.Option("--min-rate", help="a target of your own: right answers a second")]
TargetsFile = Annotated[
    Path | None, typer.Option("--targets", help="your targets.toml instead of the documented ones", dir_okay=False)
]
Hardware = Annotated[str, typer.Option(help="what a remote target runs on, such as 'V100' or 'NVIDIA H200, 16 cores'")]
MetricsUrl = Annotated[str, typer.Option("--metrics", help="its metrics page [two ports above --target's]")]
PrometheusUrl = Annotated[str, typer.Option("--prometheus", help="a Prometheus that scrapes it: asked instead")]
ServerPid = Annotated[int, typer.Option(min=0, hidden=True, help="the process of the target that starts this run")]
Processes = Annotated[int, typer.Option(min=1, max=64, help="driver processes")]
Seed = Annotated[int, typer.Option(min=0, help="of payloads, mix and Poisson arrivals")]
Out = Annotated[
    Path | None, typer.Option(help="folder of report and records [load-results/SCENARIO-TIME]", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="verdicts and figures as one JSON object, and nothing else")]
Commit = Annotated[
    str | None,
    typer.Option(help="commit of what is tested, for the history [that of the current folder]", show_default=False),
]
Progress = Annotated[
    Path | None, typer.Option(help="write the progress to this file, a JSON object a line", dir_okay=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="say nothing while it runs")]

RESULTS = Path("load-results")
VIDEO_URL = "http://127.0.0.1:8010"  # the video program's control API


def scenario_or_fail(name: str) -> Scenario:
    """The scenario; one sentence and exit code 2 where there is none."""
    try:
        return read_scenario(name)
    except ScenarioError as error:
        fail(str(error))


def changed_or_fail(
    scenario: Scenario,
    *,
    model: str = "",
    replay: Path | None = None,
    stream: str = "",
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    slo_p99_ms: float | None = None,
) -> Scenario:
    """The scenario as the flags have it; exit code 2 where one does not apply."""
    if not model.isprintable():  # a byte that is no UTF-8 cannot be sent, and no model has a line break in its name
        fail(f"--model {model!r}: a name is printable text")
    try:
        if model:
            scenario = overrides.with_model(scenario, model)
        scenario = overrides.with_stream(scenario, stream)
        if replay is not None:
            read_recording(replay)  # refuses a damaged one before the first phase
            scenario = overrides.with_replay(scenario, str(replay))
        if duration_s is not None:
            scenario = overrides.with_duration(scenario, duration_s)
        if rate_per_s is not None:
            scenario = overrides.with_rate(scenario, rate_per_s)
        if slo_p99_ms is not None:
            scenario = overrides.with_slo(scenario, slo_p99_ms)
    except ValueError as error:  # a ScenarioError is one
        fail(str(error))
    return scenario


def targets_or_fail(
    path: Path | None, scenario: Scenario, *, min_rate_per_s: float | None = None
) -> tuple[Target, ...]:
    """What the scenario is judged by: its documented targets or those of the file, its SLO, the rate that was given.

    Exit code 2 where the file is not sound.
    """
    above_zero_or_fail(min_rate_per_s, "--min-rate")
    try:
        documented = read_targets(path, also=(scenario.name,))
    except TargetsError as error:
        fail(str(error))
    rows = scenario_targets(documented, scenario.name)
    return (*rows, *slo_targets(scenario, documented=rows, min_rate_per_s=min_rate_per_s))


def identified(headers: Sequence[str], api_key: str) -> tuple[str, ...]:
    """The headers, and the API key as one, unless they say already who asks."""
    says_who = {"authorization", "x-api-key"} & {text.partition(":")[0].strip().lower() for text in headers}
    return (*headers, f"x-api-key: {api_key}") if api_key and not says_who else tuple(headers)


def beside_or_fail(url: str, headers: Sequence[str], file: Path | None) -> Endpoint | None:
    """The server to compare with, or None without a URL; exit code 2 if the header file is not valid."""
    if file is None:
        return endpoint_or_fail(url, flag="--beside", headers=headers) if url else None
    if not url:
        fail("--beside-header-file goes with --beside URL; add that flag")
    try:
        from_file = EngineHeaders(read_header_file(file)).names_and_values
    except HeaderFileError as error:
        fail(f"--beside-header-file: {error}")
    given = [text for text in headers if text.partition(":")[0].strip().lower() not in dict(from_file)]
    return endpoint_or_fail(url, flag="--beside", headers=[*given, *(f"{name}: {value}" for name, value in from_file)])


def endpoint_or_fail(
    url: str, *, flag: str, grpc_address: str = "", image_path: str = "", headers: Sequence[str] = ()
) -> Endpoint:
    """The server that the flags name; exit code 2 where an address is none.

    user:password@ in the URL becomes a header, so that no report and no sentence repeats it.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        fail(f"{flag} {url}: an address such as http://127.0.0.1:8000 is needed")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    given_headers = [_header(text) for text in headers]
    if parts.username is not None and not any(name.lower() == "authorization" for name, _ in given_headers):
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        given_headers.append(("Authorization", f"Basic {b64encode(user.encode()).decode()}"))
    if grpc_address and not re.fullmatch(r".+:\d{1,5}", grpc_address):
        fail(f"--grpc {grpc_address}: an address such as 127.0.0.1:8001 is needed")
    given = {"image_path": image_path} if image_path else {}
    return Endpoint(
        http_url=without_user(url).rstrip("/"),
        grpc_address=grpc_address or f"{host}:{port + 1}",
        headers=tuple(given_headers),
        **given,
    )


def above_zero_or_fail(value: float | None, flag: str) -> None:
    """Exit code 2 for a number that is none, or not above 0."""
    if value is not None and not 0 < value < math.inf:
        fail(f"{flag} {value:g}: a finite number above 0 is needed")


def folder_or_fail(out: Path | None, name: str) -> Path:
    """The run's folder, made; exit code 2 where it cannot be, or holds another run."""
    plain_name = re.sub(r"[^\w.-]+", "-", name)  # a scenario's own name may be any text
    folder = out or RESULTS / f"{plain_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_taken = any((folder / name).exists() for name in (RUN_FILE, RECORDS_FILE))
    except OSError as error:
        fail(f"--out {folder}: {error.strerror or error}")
    if is_taken:
        fail(f"--out {folder} holds another run; name another folder, or remove that one")
    return folder


def command_line() -> str:
    """What was typed, for the report; a header's value and what stands before a URL's @ may be a secret."""
    words = ["penstock", *(re.sub(r"://[^/?#]*@", "://…@", word) for word in sys.argv[1:])]
    for place, word in enumerate(words):
        if words[place - 1] == "--api-key" or word.startswith("--api-key="):
            words[place] = re.sub(r"(^--api-key=)?.*", r"\1…", word, count=1)
        if words[place - 1] == "--header" or word.startswith("--header="):
            words[place] = re.sub(r"(:\s*).*", r"\1…", word)
    return shlex.join(words)


def commit_or_fail(given: str | None) -> str:
    """The commit that was given, else that of the current folder's checkout; exit code 2 for one that is not a word."""
    if given is None:
        return checkout_commit(Path.cwd())
    if not re.fullmatch(r"[\w.+/-]{1,80}", given):
        fail(f"--commit {given!r}: up to 80 letters, digits and . + / - are needed")
    return given


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name.strip()):
        fail(f"--header {text!r}: 'NAME: VALUE' is needed")
    if not re.fullmatch(r"[\t -~]*", value):
        fail(f"--header {name.strip()!r}: its value has signs other than printable ASCII, which HTTP does not carry")
    return name.strip(), value.strip()
