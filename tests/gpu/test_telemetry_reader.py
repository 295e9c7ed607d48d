"""The gateway's view of its cards: the process that asks NVML, held; what a scrape reads; a lost card's return."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock.gpu.telemetry.health import CardHealth
from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad, ProcessLoad, TelemetryMessage, Xid
from penstock.gpu.telemetry.reader import (
    TelemetryOptions,
    TelemetryReader,
    checked_source,
    has_driver,
    telemetry_metrics,
)
from tests.support.waiting import until

QUICK = TelemetryOptions(interval_s=0.02, silent_s=0.3, restart_delay_s=0.01, no_gpu_delay_s=0.01)
CARD = CardLoad(0, "GPU-a", "NVIDIA H200", kernel_running=1.0, source=ActivitySource.GPM, activity=Activity(sm=0.01))
SLEEP = "import sys; sys.stdin.read()"


def saying(*lines: TelemetryMessage, then: str = SLEEP) -> str:
    """A program that says so, then does something else."""
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    return f"import sys; sys.stdout.buffer.write({text!r}); sys.stdout.flush(); {then}"


@contextlib.asynccontextmanager
async def running(program: str, options: TelemetryOptions = QUICK) -> AsyncIterator[TelemetryReader]:
    """A reader whose process is this Python program, at 100 s of its clock."""
    reader = TelemetryReader(options, CardHealth(), program=(sys.executable, "-I", "-c", program), clock=lambda: 100.0)
    task = asyncio.create_task(reader.run())
    try:
        async with asyncio.timeout(30):
            yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_reader_has_the_means_of_the_last_ten_seconds() -> None:
    """Lines of before do not count, nor does rubbish between them; its process ends with it."""
    old, new = (msgspec.structs.replace(CARD, activity=Activity(sm=sm)) for sm in (0.9, 0.03))
    lines = (
        TelemetryMessage(89.0, 1.0, (old,), has_nvml=True),
        TelemetryMessage(99.0, 1.0, (CARD,)),
        TelemetryMessage(100.0, 1.0, (new,)),
    )
    program = saying(*lines[:2], then="print('rubbish', flush=True); " + saying(lines[2]).partition("; ")[2])
    async with running(program) as reader:
        await until(lambda: reader.loads() and reader.loads()[0].activity.sm == pytest.approx(0.02))
        (child,) = [one for one in psutil.Process().children() if "rubbish" in str(one.cmdline())]
    assert not child.is_running()


async def test_reader_knows_nothing_of_long_ago() -> None:
    """No series is better than one of a minute ago."""
    async with running(saying(TelemetryMessage(50.0, 1.0, (CARD,), has_nvml=True))) as reader:
        await until(lambda: reader.health.cards)
        assert reader.loads() == ()
        assert telemetry_metrics(reader)["gpu_sm_activity"]() == {}


async def test_process_that_dies_is_started_again(tmp_path: Path) -> None:
    """As the one does that saw a lost card: NVML finds it again in a new process only."""
    lost = msgspec.structs.replace(CARD, lost="GPU is lost")
    first, second = (
        msgspec.json.encode(TelemetryMessage(99.5, 1.0, (one,), has_nvml=True)).decode() for one in (lost, CARD)
    )
    mark = tmp_path / "was here"
    program = (
        f"import pathlib, sys; mark = pathlib.Path({str(mark)!r})\n"
        f"if mark.exists(): print({second!r}, flush=True); sys.stdin.read()\n"
        f"else: mark.touch(); print({first!r}, flush=True)"
    )
    seen = []
    async with running(program) as reader:
        await until(lambda: seen.append(reader.health.reason) or (mark.exists() and reader.health.cards == {0: ""}))
    assert any("GPU is lost" in reason for reason in seen)


async def test_process_that_hangs_is_replaced() -> None:
    """A driver that does not answer is reported; the card is not called lost for it: the engine's canaries say that."""
    options = TelemetryOptions(interval_s=0.02, silent_s=0.05, restart_delay_s=0.01)
    async with running(saying(TelemetryMessage(99.0, 1.0, (CARD,), has_nvml=True)), options) as reader:
        await until(lambda: reader.health.cards)
        first = {one.pid for one in psutil.Process().children()}
        await until(lambda: {one.pid for one in psutil.Process().children()} - first)
        assert reader.health.reason == ""


async def test_process_that_not_even_a_kill_ends_has_no_second_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a driver that never comes back: they would be a hundred in an hour. Once it has ended the next one asks."""
    killed: list[int] = []
    kill = asyncio.subprocess.Process.kill

    def kill_in_vain(process: asyncio.subprocess.Process) -> None:
        if killed:
            kill(process)
        killed.append(process.pid)

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", kill_in_vain)
    monkeypatch.setattr("penstock.gpu.telemetry.reader.STOP_S", 0.2)
    starts = tmp_path / "starts"
    program = (
        f"import pathlib, sys, time; starts = pathlib.Path({str(starts)!r}); is_first = not starts.exists()\n"
        "starts.open('a').write('.')\n"
        "if is_first: print('a word', flush=True); time.sleep(60)\n"
        "sys.stdin.read()"
    )
    options = TelemetryOptions(silent_s=0.01, restart_delay_s=0.01, no_gpu_delay_s=0.01)
    async with running(program, options):
        await until(lambda: starts.exists() and killed)
        await asyncio.sleep(0.5)
        assert starts.read_text() == "."
        os.kill(killed[0], signal.SIGKILL)
        await until(lambda: len(starts.read_text()) > 1)


async def test_program_that_cannot_be_started_leaves_the_gateway_alone() -> None:
    """There are no figures, and that is all."""
    reader = TelemetryReader(QUICK, CardHealth(), program=("/nowhere/python",))
    task = asyncio.create_task(reader.run())
    await asyncio.sleep(0)
    assert telemetry_metrics(reader)["gpu_up"]() == {}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_scrape_reads_every_figure_with_its_source() -> None:
    """Unknown figures have no series; processes of one name are summed; Xids are counted."""
    processes = (
        ProcessLoad(7, "resnet50_0_0", 1 << 30, 0.4, is_mps_client=True),
        ProcessLoad(8, "python3", 1 << 20),
        ProcessLoad(9, "python3", 1 << 20, 0.25),
    )
    card = msgspec.structs.replace(CARD, processes=processes)
    line = TelemetryMessage(99.5, 1.0, (card, CardLoad(1, "GPU-b", lost="GPU is lost")), (Xid(1, 79),), has_nvml=True)
    async with running(saying(line)) as reader:
        await until(lambda: reader.health.cards)
        values = {name: dict(read()) for name, read in telemetry_metrics(reader).items()}
    assert values == {
        "gpu_info": {("0", "GPU-a"): 1.0, ("1", "GPU-b"): 1.0},
        "gpu_up": {("0",): 1.0, ("1",): 0.0},
        "gpu_sm_activity": {("0", "gpm"): 0.01},
        "gpu_sm_occupancy": {},
        "gpu_tensor_activity": {},
        "gpu_memory_bandwidth_activity": {},
        "gpu_nvdec_activity": {},
        "gpu_nvjpg_activity": {},
        "gpu_kernel_running_share": {("0",): 1.0},
        "gpu_process_memory_bytes": {("0", "resnet50_0_0"): 1 << 30, ("0", "python3"): 2 << 20},
        "gpu_process_time_share": {("0", "resnet50_0_0"): 0.4, ("0", "python3"): 0.25},
        "gpu_xid_errors_total": {("1", "79"): 1},
    }
    assert telemetry_metrics(None) == {}


@pytest.mark.parametrize("said", ["", "on", "node:9400", "http://", "http://node:x/", "file:///etc/passwd"])
def test_source_of_the_figures_is_nvml_or_none_or_an_exporter(said: str) -> None:
    """Others are refused with what it takes."""
    for taken in ("auto", "off", "http://node:9400/metrics", "https://[::1]:9400/metrics"):
        assert checked_source(taken) == taken
    with pytest.raises(ValueError, match="auto, off, or a dcgm-exporter's"):
        checked_source(said)


def test_driver_shows_itself_by_its_files(tmp_path: Path) -> None:
    """Where none is there no process is started to ask it."""
    there = tmp_path / "nvidiactl"
    assert not has_driver((tmp_path / "version", there))
    there.touch()
    assert has_driver((tmp_path / "version", there))
