"""What kept the machine busy besides server and generator is said, and only where it can be known."""

import msgspec

from penstock_load.report.figures import neighbours
from penstock_load.report.pages import render_html, render_markdown
from penstock_load.results import Run
from tests.loadtest.runs import make_run


def with_loads(run: Run, *, machine_cpu: float, server_cpu: float | None, generator_cpu: float) -> Run:
    """The run on two cores with those loads in every second."""
    phases = []
    for phase in run.phases:
        seconds = tuple(
            msgspec.structs.replace(second, machine_cpu=machine_cpu, server_cpu=server_cpu) for second in phase.timeline
        )
        health = msgspec.structs.replace(phase.health, cpu=generator_cpu, processes=1)
        phases.append(msgspec.structs.replace(phase, timeline=seconds, health=health))
    machine = msgspec.structs.replace(run.machine, cores=2)
    return msgspec.structs.replace(run, phases=tuple(phases), machine=machine, is_local=True)


def test_neighbour_that_takes_cores_is_named_in_the_report() -> None:
    """Two busy cores, of which server and generator used half of one; it stands beside the verdict."""
    run = with_loads(make_run(), machine_cpu=1.0, server_cpu=0.4, generator_cpu=0.1)
    assert "other programs kept 1.5" in neighbours(run)
    assert "other programs kept 1.5" in render_markdown(run).partition("## ")[0]
    verdict = render_html(run).partition('<p class="verdict')[2].partition("</p>")[0]
    assert "other programs kept 1.5" in verdict


def test_machine_that_only_serves_and_asks_has_no_neighbours() -> None:
    """What server and generator use is theirs."""
    assert neighbours(with_loads(make_run(), machine_cpu=0.8, server_cpu=1.4, generator_cpu=0.1)) == ""


def test_neighbours_of_a_server_elsewhere_are_not_guessed_at() -> None:
    """This machine's load says nothing of that one, and an unread load says nothing at all."""
    busy = with_loads(make_run(), machine_cpu=1.0, server_cpu=0.4, generator_cpu=0.1)
    assert neighbours(msgspec.structs.replace(busy, is_local=False)) == ""
    assert neighbours(with_loads(make_run(), machine_cpu=1.0, server_cpu=None, generator_cpu=0.1)) == ""
