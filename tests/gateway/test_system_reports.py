"""System reports: shared results, doctor's process, the audit log, GPUs, processes, settings."""

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from penstock.gateway.audit import AuditLog
from penstock.gateway.settings import Settings
from penstock.gateway.settings_report import read_origins, setting_rows, write_origins
from penstock.gateway.system.examination import Examination
from penstock.gateway.system.processes import process_usage, role_of
from penstock.gateway.system.reports import AUDIT_BYTES, RecentResult, SystemReports, log_time, read_audit_log
from penstock.gpu.telemetry.messages import Activity, CardLoad, ProcessLoad
from penstock.protocol.errors import DeadlineExceeded, InferenceError, InvalidRequest, NotSupported
from tests.support.system_sources import FINDINGS, doctor_that_prints, plain_sources


async def test_result_is_shared_by_concurrent_clients_and_for_a_while() -> None:
    """Clients cannot make the call run more often than its age allows; a client that leaves does not end it."""
    calls, release = [], asyncio.Event()

    async def call() -> int:
        calls.append(1)
        await release.wait()
        return len(calls)

    result = RecentResult(call, max_age_s=60.0)
    first, leaving = asyncio.create_task(result.get()), asyncio.create_task(result.get())
    await asyncio.sleep(0)
    leaving.cancel()
    release.set()
    assert await first == await result.get() == 1
    assert leaving.cancelled()
    expired = RecentResult(call, max_age_s=-1.0)
    assert [await expired.get(), await expired.get()] == [2, 3]


async def test_failed_call_is_shared_like_a_result() -> None:
    """An error is not a reason to call again at once."""
    calls = []

    async def call() -> None:
        calls.append(1)
        raise InferenceError("no")

    result = RecentResult(call, max_age_s=60.0)
    for _ in range(3):
        with pytest.raises(InferenceError, match="no"):
            await result.get()
    assert len(calls) == 1


async def test_findings_are_doctors_and_those_of_models() -> None:
    """A model that should serve and does not is a finding with its reason and a command."""
    report = await SystemReports(plain_sources()).findings()
    machine, model = report.findings
    assert (machine.id, machine.status) == ("disk.room", "warning")
    assert (model.id, model.found) == ("models.broken", "broken: its file is empty")
    assert model.advice.endswith("penstock models load broken")


async def test_doctor_that_hangs_is_killed_at_its_deadline() -> None:
    """The client gets a sentence, and no process stays."""
    command = (sys.executable, "-S", "-c", "import time; print('x', flush=True); time.sleep(600)")
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 0.2 s; run `penstock doctor`"):
        await Examination(b"{}", command, deadline_s=0.2).run()
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not any("time.sleep(600)" in part for child in children for part in child.cmdline())


async def test_doctor_that_fails_is_an_error_with_its_exit_code() -> None:
    """Also if it prints something else."""
    assert [one.id for one in await doctor_that_prints(FINDINGS).run()] == ["disk.room"]
    with pytest.raises(InferenceError, match="exit code 0 and no findings"):
        await doctor_that_prints("nonsense").run()
    with pytest.raises(InferenceError, match="exit code 3 and no findings"):
        await Examination(b"{}", (sys.executable, "-S", "-c", "raise SystemExit(3)")).run()


def test_audit_log_is_read_from_its_end(tmp_path: Path) -> None:
    """At most 1 MiB and the newest lines; a torn line and another program's are left out."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    path.write_text("nonsense\n" + '{"time": "x"}\n' + "y" * AUDIT_BYTES + "\n")
    for number in range(5):
        log.record("ops", "127.0.0.1", "load", f"model {number}", "ok")
    log.close()
    with path.open("a") as file:
        file.write('{"time": "2026-11-2')
    report = read_audit_log(path, 3)
    assert [line.target for line in report.lines] == ["model 2", "model 3", "model 4"]
    assert (report.lines[0].client, report.lines[0].action) == ("ops", "load")


def test_audit_log_that_cannot_be_read_back_says_why(tmp_path: Path) -> None:
    """A pipe or a terminal would block its reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in ((pipe, "not a regular file"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(NotSupported, match=words):
            read_audit_log(path, 3)


async def test_gpus_show_load_and_loss() -> None:
    """A card that NVML no longer shows is listed with the reason."""
    card = CardLoad(
        0,
        name="H100",
        activity=Activity(sm=0.5),
        memory_used_bytes=1,
        memory_bytes=2,
        processes=(ProcessLoad(7, "street_0", 10, 0.25, is_mps_client=True),),
    )
    reports = SystemReports(plain_sources(gpus=lambda: (card,), lost_gpus=lambda: {0: "", 1: "Xid 79"}))
    first, lost = (await reports.system(has_details=True)).gpus
    assert (first.name, first.sm_activity, first.lost) == ("H100", 0.5, "")
    assert first.processes[0].is_mps_client
    assert (lost.index, lost.lost, lost.sm_activity) == (1, "Xid 79", None)


def test_processes_are_the_parent_and_its_descendants() -> None:
    """With role, memory, CPU time and age; a parent that is gone has none."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    try:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"1"
        parent, *others = process_usage(os.getpid())
        assert (parent.pid, parent.role) == (os.getpid(), "up")
        found = next(one for one in others if one.pid == child.pid)
        assert found.role.startswith("python")
        assert found.rss_bytes > 0
        assert parent.cpu_seconds > 0 <= found.age_s
    finally:
        child.communicate(b"\n")
    assert process_usage(child.pid) == []


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        (["/usr/bin/python", "-m", "penstock.vision.decoder_worker", "5"], "decoder"),
        (["/usr/bin/python", "-P", "-m", "penstock.gpu.telemetry"], "gpu telemetry"),
        (["/usr/bin/python", "-m", "penstock_video.cli.run"], "video"),
        (["/usr/bin/python", "-P", "-m", "penstock.cli.main", "console", "--host", "::1"], "console"),
        (["/usr/bin/python", "-m", "penstock.cli.main"], "penstock.cli.main"),
        (["/usr/bin/python", "-m", "other" * 40], ("other" * 40)[:64]),
        (["/opt/tritonserver", "--model-repository=/m"], "tritonserver"),
        (["/usr/bin/python", "-m"], "python"),
        ([], ""),
    ],
)
def test_role_of_a_process_is_read_from_its_command(arguments: list[str], role: str) -> None:
    """Ours by their module; others by the program's name, bounded."""
    assert role_of(arguments) == role


def test_settings_have_their_origin_and_no_secret(tmp_path: Path) -> None:
    """Default, file, variable, flag, or decided at the start; keys and passwords in URLs are hidden."""
    settings = Settings(
        http_port=9000,
        engine="http://me:pass@triton:8000",
        api_keys=("ops:admin:" + "0" * 64,),
        mps_directory=tmp_path,
        grace_s=5,
    )
    write_origins(tmp_path, {"http_port": "--http-port", "engine": "PENSTOCK_ENGINE", "grace_s": "a.toml:3"})
    rows = {row.name: row for row in setting_rows(settings, read_origins(tmp_path))}
    assert rows.keys() == Settings.model_fields.keys()
    assert (rows["http_port"].value, rows["http_port"].default, rows["http_port"].origin) == (9000, 8000, "flag")
    assert (rows["engine"].value, rows["engine"].origin) == ("http://(hidden)@triton:8000", "variable")
    assert (rows["grace_s"].origin, rows["grace_s"].source) == ("file", "a.toml:3")
    assert (rows["mps_directory"].origin, rows["log_level"].origin) == ("start", "default")
    assert rows["api_keys"].value == "(hidden)"
    assert oct((tmp_path / "origins.json").stat().st_mode & 0o777) == "0o600"
    assert read_origins(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("10m", "2026-11-29T02:50:00.000000Z"),
        ("2h", "2026-11-29T01:00:00.000000Z"),
        ("2026-11-29T02:00:00Z", "2026-11-29T02:00:00.000000Z"),
        ("2026-11-29T02:00:00", "2026-11-29T02:00:00.000000Z"),
        ("2026-11-29T03:00:00+01:00", "2026-11-29T02:00:00.000000Z"),
        ("2026-11-29", "2026-11-29T00:00:00.000000Z"),
    ],
)
def test_time_of_a_log_query_is_a_duration_or_iso_8601(text: str, moment: str) -> None:
    """In the form of the log's own times."""
    assert log_time(text, datetime(2026, 11, 29, 3, tzinfo=UTC)) == moment


def test_time_that_does_not_exist_is_refused() -> None:
    """With the allowed forms."""
    with pytest.raises(InvalidRequest, match="it must be a duration such as 30s, 10m, 2h or 1d"):
        log_time("0m", datetime(2026, 11, 29, 3, tzinfo=UTC))
