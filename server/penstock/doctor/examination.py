"""Runs all probes in parallel, each with a deadline."""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.doctor import engine, gpu, host, mps, storage
from penstock.doctor.finding import Finding, Severity, StackPlan
from penstock.gpu.nvml import READ_TIMEOUT_S
from penstock.gpu.video_engines import READ_TIMEOUT_S as ENGINES_TIMEOUT_S

QUICK_S = 5.0
CHILD_S = 10.0  # for probes that start programs


@dataclass(frozen=True, slots=True)
class Examiner:
    """Subjects probed together; each gets a finding. examine: blocks, may raise."""

    subjects: tuple[str, ...]
    examine: Callable[[StackPlan], list[Finding]]
    deadline_s: float = QUICK_S


def _examine_graphics(plan: StackPlan) -> list[Finding]:
    facts = gpu.probe_graphics()
    reading = facts.reading
    on_video = gpu.video_findings(gpu.probe_video(), reading.cards) if reading.cards else gpu.no_card_findings()
    tensorrt = gpu.tensorrt_findings(
        reading, has_plugin=gpu.has_tensorrt_plugin(plan.engine_environment), has_builder=gpu.has_tensorrt_builder()
    )
    return [
        *gpu.graphics_findings(facts),
        *gpu.wanted_findings(reading, plan.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")),
        *gpu.image_findings(reading),
        *tensorrt,
        *mps.mps_findings(mps.probe_mps(), reading),
        *on_video,
    ]


EXAMINERS = (
    Examiner(("host",), lambda plan: host.host_findings(host.probe_host(plan))),
    Examiner(("cpu",), lambda plan: host.processor_findings(host.probe_processor(plan))),
    Examiner(("memory",), lambda plan: host.memory_findings(host.probe_memory(plan))),
    Examiner(
        ("gpu", "image", "tensorrt", "mps", "video"), _examine_graphics, READ_TIMEOUT_S + ENGINES_TIMEOUT_S + QUICK_S
    ),
    Examiner(("engine",), lambda plan: engine.engine_findings(engine.probe_engine(plan)), 2 * CHILD_S),
    Examiner(("shm",), lambda plan: storage.shared_memory_findings(storage.probe_shared_memory(plan))),
    Examiner(("limits",), lambda plan: host.limit_findings(host.probe_limits(plan))),
    Examiner(("ports",), lambda plan: engine.port_findings(engine.probe_ports(plan))),
    Examiner(("disk",), lambda plan: storage.disk_findings(storage.probe_disk(plan))),
)


def examine(plan: StackPlan, examiners: Sequence[Examiner] = EXAMINERS) -> list[Finding]:
    """The findings in the examiners' order. A probe that fails or times out becomes a finding; its thread may stay."""
    begun_s = time.monotonic()
    answers = [_start(examiner, plan) for examiner in examiners]
    findings: list[Finding] = []
    for examiner, answer in zip(examiners, answers, strict=True):
        left_s = begun_s + examiner.deadline_s - time.monotonic()
        try:
            findings += answer.get(timeout=max(left_s, 0.001))
        except queue.Empty:
            found = f"no answer within {examiner.deadline_s:g} s"
            findings += _unanswered(examiner, found, "look at the machine: a disk, a mount or a driver hangs")
    return findings


def _start(examiner: Examiner, plan: StackPlan) -> queue.SimpleQueue[list[Finding]]:
    answer: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(examiner.examine(plan))
        except Exception as error:  # noqa: BLE001 - thread root: a failure becomes a finding
            found = f"could not be looked at: {type(error).__name__}: {error}"
            answer.put(_unanswered(examiner, found, "report it with the output of penstock doctor --json"))

    threading.Thread(target=run, name=f"doctor-{examiner.subjects[0]}", daemon=True).start()
    return answer


def _unanswered(examiner: Examiner, found: str, advice: str) -> list[Finding]:
    return [Finding(f"{subject}.probe", Severity.WARNING, found, advice) for subject in examiner.subjects]
