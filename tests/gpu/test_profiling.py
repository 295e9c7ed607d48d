"""How the engine is started under a profiler: the command line, the ranges, and what is said where there is none."""

from pathlib import Path

import pytest

from penstock.engines.triton.runtime import TritonRuntime
from penstock.gateway.settings import Settings
from penstock.gateway.stack.startup import CannotStart, EngineChoice, choose_profiling
from penstock.gpu.profiling import ProfilerMissing, ProfilerMode, plan_profiling


def found(*programs: str) -> object:
    """A PATH that has these."""
    return lambda program: f"/opt/{program}" if program in programs else None


def test_engine_that_is_not_profiled_is_started_as_ever(tmp_path: Path) -> None:
    """No profiler is searched for."""
    assert plan_profiling(ProfilerMode.OFF, tmp_path, "run", which=pytest.fail) is None


@pytest.mark.parametrize(
    ("profile", "programs", "program"),
    [
        (ProfilerMode.NSYS, ("nsys", "ncu"), "nsys"),
        (ProfilerMode.AUTO, ("nsys", "ncu"), "nsys"),
        (ProfilerMode.NCU, ("nsys", "ncu"), "ncu"),
        (ProfilerMode.AUTO, ("ncu",), ""),
        (ProfilerMode.AUTO, (), ""),
        (ProfilerMode.NVTX, ("nsys",), ""),
    ],
)
def test_profiler_stands_before_the_engine_and_ranges_are_marked(
    tmp_path: Path, profile: ProfilerMode, programs: tuple[str, ...], program: str
) -> None:
    """Its report is named after the run and the process; without one there are ranges alone."""
    plan = plan_profiling(profile, tmp_path, "run", which=found(*programs))  # type: ignore[arg-type]
    assert plan is not None
    assert plan.environment == {"PENSTOCK_NVTX": "1"}
    assert plan.prefix[:1] == ((f"/opt/{program}",) if program else ())
    assert plan.report == (tmp_path / "run-%p" if program else None)
    assert plan.prefix[-2:] == (("-o", str(tmp_path / "run-%p")) if program else ())


@pytest.mark.parametrize(("profile", "program"), [(ProfilerMode.NSYS, "nsys"), (ProfilerMode.NCU, "ncu")])
def test_profiler_that_is_asked_for_and_absent_is_named(tmp_path: Path, profile: ProfilerMode, program: str) -> None:
    """With what to do."""
    with pytest.raises(ProfilerMissing, match=f"{program} is not on PATH; install NVIDIA Nsight"):
        plan_profiling(profile, tmp_path, "run", which=found())  # type: ignore[arg-type]


def test_profile_without_a_triton_of_ours_is_refused(tmp_path: Path) -> None:
    """It would profile nothing; and where the reports cannot be written that is said before anything starts."""
    settings = Settings(profile=ProfilerMode.NVTX, home=tmp_path)
    with pytest.raises(CannotStart, match="profile is of a Triton that is started here"):
        choose_profiling(EngineChoice(settings), "run")
    assert choose_profiling(EngineChoice(Settings(home=tmp_path)), "run") is None
    plan = choose_profiling(EngineChoice(settings, TritonRuntime(tmp_path / "tritonserver")), "run")
    assert plan is not None
    assert plan.report is None


def test_reports_have_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under HOME, made where it is not there; a HOME that cannot be written is said."""
    nsys = tmp_path / "nsys"
    nsys.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    triton = TritonRuntime(tmp_path / "tritonserver")
    plan = choose_profiling(EngineChoice(Settings(profile=ProfilerMode.NSYS, home=tmp_path / "home"), triton), "run")
    assert plan is not None
    assert plan.report == tmp_path / "home" / "profiles" / "run-%p"
    assert plan.report.parent.is_dir()
    with pytest.raises(CannotStart, match="no folder for profiles"):
        choose_profiling(EngineChoice(Settings(profile=ProfilerMode.NSYS, home=nsys), triton), "run")
