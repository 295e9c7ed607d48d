"""`penstock status`: the state of the running stack on one screen."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.gateway_client import ApiKey, GatewayClient, Url, VideoUrl, gateway_of
from penstock.cli.terminal import fail, one_line, print_failure, print_json, stoppable
from penstock.log_file import LogLine
from penstock.protocol.errors import InferenceError
from penstock.protocol.system_reports import GpuSummary, ModelQueue, ModelSummary, ProcessUsage, SystemReport

VIDEO_TIMEOUT_S = 1.0
INTERVAL_S = 2.0
SHOWN_MODELS, SHOWN_STREAMS, SHOWN_ERRORS = 12, 8, 5
MIB, GIB = 1 << 20, 1 << 30
STATE_STYLES = {"ready": "green", "unavailable": "bold red", "running": "green", "failed": "bold red"}


class StreamSummary(msgspec.Struct, frozen=True):
    """A stream of the video program."""

    source_id: str
    state: str
    reason: str = ""
    fps: float = 0.0
    latency_s: float | None = None
    drops: dict[str, int] = {}
    decoder_reason: str = ""


class StreamList(msgspec.Struct, frozen=True):
    """The video program's response."""

    streams: list[StreamSummary]


def status(
    url: Url = None,
    api_key: ApiKey = "",
    video_url: VideoUrl = "http://127.0.0.1:8010",
    video_api_key: Annotated[
        str,
        typer.Option(
            envvar="PENSTOCK_VIDEO_API_KEY", show_default=False, help="API key of the video program [--api-key]"
        ),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help=f"refresh every {INTERVAL_S:g} s, until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object only")] = False,
) -> None:
    """Show the running stack: engine, models, queues, streams, processes, GPUs, and the last errors.

    Exit code 1 if the gateway does not respond or is not ready.
    """
    gateway, video = gateway_of(url, api_key), GatewayClient(video_url, video_api_key or api_key)
    if watch:
        with stoppable("the stack runs on"):
            _watch(gateway, video, as_json=as_json)
    try:
        report = gateway.read("/v1/system", SystemReport)
    except InferenceError as error:
        fail(str(error), code=1)
    streams = _streams(video)
    if as_json:
        print_json(_as_object(report, streams))
    else:
        Console(highlight=False).print(screen(report, gateway.url, streams))
    if not report.is_ready:
        raise typer.Exit(1)


def _watch(gateway: GatewayClient, video: GatewayClient, *, as_json: bool) -> None:
    """Refreshes until Ctrl-C. Shows the error while the gateway does not respond."""
    before: dict[int, ProcessUsage] = {}
    with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
        while True:
            try:
                report = gateway.read("/v1/system", SystemReport)
                if as_json:
                    print_json(_as_object(report, _streams(video)))
                else:
                    live.update(screen(report, gateway.url, _streams(video), before), refresh=True)
                before = {process.pid: process for process in report.processes}
            except InferenceError as error:
                if as_json:
                    print_failure(str(error))
                else:
                    live.update(Text(one_line(str(error)), style="bold red"), refresh=True)
            time.sleep(INTERVAL_S)


def _streams(video: GatewayClient) -> list[StreamSummary] | None:
    """Streams of the video program; None if it does not respond."""
    with suppress(InferenceError):
        return video.read("/v1/streams", StreamList, VIDEO_TIMEOUT_S).streams
    return None


def _as_object(report: SystemReport, streams: list[StreamSummary] | None) -> dict[str, object]:
    return {**msgspec.to_builtins(report), "streams": msgspec.to_builtins(streams)}


def screen(
    report: SystemReport,
    url: str,
    streams: list[StreamSummary] | None = None,
    before: dict[int, ProcessUsage] | None = None,
) -> Group:
    """The whole report as text. before: earlier process figures by PID, to compute CPU use."""
    state = Text("ready", "green") if report.is_ready else Text(f"not ready: {one_line(report.reason)}", "bold red")
    head = Text(f"penstock {one_line(report.version)} at {url}: ").append_text(state)
    head.append(f", up {duration(report.uptime_s)}, {report.in_flight} in flight")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines in _parts(report, streams, before or {}):
        for number, line in enumerate(lines):
            table.add_row("" if number else Text(label, "bold"), line)
    return Group(head, table)


def _parts(
    report: SystemReport, streams: list[StreamSummary] | None, before: dict[int, ProcessUsage]
) -> Iterator[tuple[str, Iterable[Text]]]:
    """(label, lines) of each section; sections without lines are omitted."""
    yield "engine", _engine(report)
    yield "models", _models(report.models, report.engine.placements)
    yield "queues", [_queue(queue) for queue in report.queues if queue.waiting or queue.in_flight]
    if report.video_fault:
        yield "video", [Text(one_line(report.video_fault), "bold red")]
    if streams is not None:
        yield "streams", _stream_lines(streams)
    yield "processes", _processes(report.processes, before)
    yield "gpus", [_gpu(gpu) for gpu in report.gpus]
    if report.mps is not None:
        mps = report.mps
        yield (
            "mps",
            [Text(f"{_count(mps.clients, 'client')}, {mps.unattached} processes outside MPS, {mps.restarts} restarts")],
        )
    yield "errors", _errors(report.errors)


def _engine(report: SystemReport) -> Iterator[Text]:
    engine = report.engine
    line = Text(one_line(engine.name or engine.kind))
    line.append(", up" if engine.is_up else f", down: {one_line(engine.reason)}", "" if engine.is_up else "bold red")
    line.append(f", {_count(engine.restarts, 'restart')}" if engine.restarts else "")
    yield line
    for replica in engine.replicas:
        yield Text(one_line(f"{replica.url} {replica.state}, {replica.in_flight} in flight"))


def _models(models: list[ModelSummary], placements: dict[str, str]) -> Iterator[Text]:
    """Counts by state, then models, unavailable ones first; of several cards, those of each model."""
    counts: dict[str, int] = defaultdict(int)
    for model in models:
        counts[model.state] += 1
    yield Text(", ".join(f"{count} {one_line(state)}" for state, count in sorted(counts.items())) or "none")
    ordered = sorted(models, key=lambda model: (model.state != "unavailable", model.state != "ready", model.name))
    for model in ordered[:SHOWN_MODELS]:
        line = Text(one_line(model.name) + " ").append(one_line(model.state), STATE_STYLES.get(model.state, ""))
        line.append(f"  {one_line(placements[model.name])}" if model.name in placements else "")
        yield line.append(f"  {one_line(model.reason)}" if model.state == "unavailable" else "")
    if len(models) > SHOWN_MODELS:
        yield Text(f"and {len(models) - SHOWN_MODELS} more: penstock models list")


def _queue(queue: ModelQueue) -> Text:
    wait = "" if queue.wait_s is None else f", queue delay {1000 * queue.wait_s:.0f} ms"
    return Text(f"{one_line(queue.model)}: {queue.waiting} waiting, {queue.in_flight} in flight{wait}")


def _stream_lines(streams: list[StreamSummary]) -> Iterator[Text]:
    if not streams:
        yield Text("none")
    for stream in sorted(streams, key=lambda one: (one.state == "running", one.source_id))[:SHOWN_STREAMS]:
        line = Text(one_line(stream.source_id) + " ").append(
            one_line(stream.state), STATE_STYLES.get(stream.state, "yellow")
        )
        lag = "" if stream.latency_s is None else f", {1000 * stream.latency_s:.0f} ms behind"
        drops = sum(stream.drops.values())
        line.append(f"  {stream.fps:.1f} fps{lag}{f', {drops} dropped' if drops else ''}")
        reason = stream.reason or (f"decoded by the CPU: {stream.decoder_reason}" if stream.decoder_reason else "")
        yield line.append(f"  {one_line(reason)}" if reason else "", "yellow")
    if len(streams) > SHOWN_STREAMS:
        yield Text(f"and {len(streams) - SHOWN_STREAMS} more")


def _processes(processes: list[ProcessUsage], before: dict[int, ProcessUsage]) -> Iterator[Text]:
    """One line per role: process count, memory, and CPU use; without earlier figures, CPU time."""
    by_role: dict[str, list[ProcessUsage]] = {}
    for process in processes:
        by_role.setdefault(process.role, []).append(process)
    for role, members in by_role.items():
        many = f" × {len(members)}" if len(members) > 1 else f" (pid {members[0].pid})"
        memory = _memory(sum(process.rss_bytes for process in members))
        known = [(process, before[process.pid]) for process in members if process.pid in before]
        if known:
            cpu = f"CPU {sum(map(_load, *zip(*known, strict=True))):.0%}"
        else:
            cpu = f"{sum(process.cpu_seconds for process in members):.1f} s of CPU"
        yield Text(f"{one_line(role)}{many}: {memory}, {cpu}")


def _load(now: ProcessUsage, before: ProcessUsage) -> float:
    """CPU cores in use between the two samples."""
    return (now.cpu_seconds - before.cpu_seconds) / max(0.1, now.age_s - before.age_s)


def _gpu(gpu: GpuSummary) -> Text:
    line = Text(f"{gpu.index} {one_line(gpu.name)}")
    if gpu.lost:
        return line.append(f" lost: {one_line(gpu.lost)}", "bold red")
    if gpu.sm_activity is not None:
        line.append(f": SM activity {gpu.sm_activity:.0%}")
    elif gpu.kernel_running is not None:
        line.append(f": utilization {gpu.kernel_running:.0%}")
    if gpu.memory_used_bytes is not None and gpu.memory_bytes:
        line.append(f", memory {gpu.memory_used_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB")
    clients = sum(process.is_mps_client for process in gpu.processes)
    return line.append(
        f", {_count(len(gpu.processes), 'process', 'es')}" + (f", {_count(clients, 'MPS client')}" if clients else "")
    )


def _errors(errors: list[LogLine]) -> Iterator[Text]:
    if not errors:
        yield Text("none")
    for line in errors[-SHOWN_ERRORS:]:
        fields = " ".join(f"{key}={value}" for key, value in line.fields.items())
        text = Text(one_line(f"{line.time[11:19]} {line.process} {line.component}:") + " ", "dim")
        yield text.append(one_line(f"{line.event} {fields}")[:300], "default not dim")


def _memory(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def duration(seconds: float) -> str:
    """Such as "3 d 4 h", "2 h 5 min", "12 s"."""
    days, rest = divmod(int(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"
