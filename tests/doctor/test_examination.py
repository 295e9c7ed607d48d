"""The examination: every subject answers, whatever its probe does, and the real machine is looked at in time."""

import threading
from pathlib import Path

from penstock.doctor.examination import EXAMINERS, Examiner, examine
from penstock.doctor.finding import Finding, Severity, StackPlan
from tests.doctor.machines import plan

GOOD = Finding("good.one", Severity.OK, "well")


def answers(_: StackPlan) -> list[Finding]:
    """An examiner that finds all well."""
    return [GOOD]


def fails(_: StackPlan) -> list[Finding]:
    """An examiner that raises."""
    raise RuntimeError("a kernel file has another shape")


def test_examine_probe_that_fails_is_a_finding_of_each_of_its_subjects(tmp_path: Path) -> None:
    """Nothing of a failing probe comes out as a traceback, and its neighbours answer."""
    found = examine(plan(tmp_path), [Examiner(("a", "b"), fails), Examiner(("good",), answers)])
    assert [(one.id, one.status) for one in found[:2]] == [("a.probe", Severity.WARNING), ("b.probe", Severity.WARNING)]
    assert "a kernel file has another shape" in found[0].found
    assert found[2:] == [GOOD]


def test_examine_probe_that_hangs_is_left_behind_at_its_deadline(tmp_path: Path) -> None:
    """One that never answers costs its own deadline and no more."""
    never = threading.Event()

    def hangs(_: StackPlan) -> list[Finding]:
        never.wait()
        return []

    found = examine(plan(tmp_path), [Examiner(("slow",), hangs, deadline_s=0.05), Examiner(("good",), answers)])
    never.set()
    assert [(one.id, one.status) for one in found] == [("slow.probe", Severity.WARNING), ("good.one", Severity.OK)]
    assert found[0].found == "no answer within 0.05 s"


def test_examine_this_machine_answers_every_subject_in_time(tmp_path: Path) -> None:
    """Every probe works here, and none is left behind at its deadline."""
    found = examine(plan(tmp_path, engine="auto"))
    assert {one.subject for one in found} == {subject for examiner in EXAMINERS for subject in examiner.subjects}
    assert [one for one in found if one.id.endswith(".probe")] == []
    assert all(one.advice for one in found if one.status is not Severity.OK)
    assert not any(one.advice for one in found if one.status is Severity.OK)
