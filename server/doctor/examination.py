"""Every subject looked at, at the same time, each under its deadline."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.doctor import (
    disk,
    engine,
    graphics,
    host,
    image,
    limits,
    memory,
    mps,
    ports,
    processor,
    shared_memory,
    video,
)
from server.doctor.finding import Finding, Status
from server.doctor.plan import Plan
from server.gpu.nvml import READ_TIMEOUT_S
from server.gpu.video_engines import READ_TIMEOUT_S as ENGINES_TIMEOUT_S

QUICK_S = 5.0
CHILD_S = 10.0  # what starts programs


@dataclass(frozen=True, slots=True)
class Examiner:
    """What is looked at together. subjects: each gets a finding, whatever happens. examine: blocks, may raise."""

    subjects: tuple[str, ...]
    examine: Callable[[Plan], list[Finding]]
    deadline_s: float = QUICK_S


def _examine_graphics(plan: Plan) -> list[Finding]:
    facts = graphics.probe()
    reading = facts.reading
    on_video = video.findings_of(video.probe(), reading) if reading.cards else video.no_card()
    of_card = [*graphics.findings_of(facts), *image.findings_of(reading), *mps.findings_of(mps.probe(), reading)]
    return [*of_card, *on_video]


EXAMINERS = (
    Examiner(("host",), lambda plan: host.findings_of(host.probe(plan))),
    Examiner(("cpu",), lambda plan: processor.findings_of(processor.probe(plan))),
    Examiner(("memory",), lambda plan: memory.findings_of(memory.probe(plan))),
    Examiner(("gpu", "image", "mps", "video"), _examine_graphics, READ_TIMEOUT_S + ENGINES_TIMEOUT_S + QUICK_S),
    Examiner(("engine",), lambda plan: engine.findings_of(engine.probe(plan)), 2 * CHILD_S),
    Examiner(("shm",), lambda plan: shared_memory.findings_of(shared_memory.probe(plan))),
    Examiner(("limits",), lambda plan: limits.findings_of(limits.probe(plan))),
    Examiner(("ports",), lambda plan: ports.findings_of(ports.probe(plan))),
    Examiner(("disk",), lambda plan: disk.findings_of(disk.probe(plan))),
)


def examine(plan: Plan, examiners: Sequence[Examiner] = EXAMINERS) -> list[Finding]:
    """The findings in the examiners' order. One that fails or does not answer in time is a finding itself.

    A probe that hangs keeps its daemon thread; the process can end all the same.
    """
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


def _start(examiner: Examiner, plan: Plan) -> queue.SimpleQueue[list[Finding]]:
    answer: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(examiner.examine(plan))
        except Exception as error:  # noqa: BLE001 - the thread's root: what fails is a finding
            found = f"could not be looked at: {type(error).__name__}: {error}"
            answer.put(_unanswered(examiner, found, "report it with the output of penstock doctor --json"))

    threading.Thread(target=run, name=f"doctor-{examiner.subjects[0]}", daemon=True).start()
    return answer


def _unanswered(examiner: Examiner, found: str, advice: str) -> list[Finding]:
    return [Finding(f"{subject}.probe", Status.WARNING, found, advice) for subject in examiner.subjects]
