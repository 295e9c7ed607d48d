"""The engine: what each choice would take on each machine, and why."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.doctor import engine
from penstock.doctor.engine import EngineFacts, OnnxRuntimeFacts
from penstock.doctor.finding import Severity
from tests.doctor.machines import pick, plan

ORT = OnnxRuntimeFacts("1.31.1", ("CPUExecutionProvider",))
NO_ORT = OnnxRuntimeFacts(None, failure="it is not installed")
TRITON = EngineFacts("auto", "Triton of nvidia-pytriton 0.7.0 in /x", "", ORT)
NONE = EngineFacts("auto", "", "no tritonserver on PATH; `penstock setup triton` installs it, or use another", ORT)
ARM = EngineFacts("auto", "", "this machine is aarch64; use --engine URL", ORT)


@pytest.mark.parametrize(
    ("facts", "status", "found", "advice"),
    [
        (TRITON, Severity.OK, "auto takes Triton of nvidia-pytriton 0.7.0", ""),
        (replace(TRITON, requested="triton"), Severity.OK, "triton takes Triton", ""),
        (replace(TRITON, requested="embedded"), Severity.OK, "embedded: ONNX Runtime 1.31.1", ""),
        (replace(TRITON, requested="http://h:8000"), Severity.OK, "an external server", ""),
        (NONE, Severity.NOTE, "because no tritonserver on PATH", "`penstock setup triton`"),
        (ARM, Severity.NOTE, "because this machine is aarch64", "--engine http://HOST:8000"),
        (replace(NONE, requested="triton"), Severity.PROBLEM, "no tritonserver on PATH", "penstock setup triton"),
        (replace(NONE, onnxruntime=NO_ORT), Severity.PROBLEM, "no engine", "make up"),
        (replace(TRITON, requested="embedded", onnxruntime=NO_ORT), Severity.PROBLEM, "no engine", "make up"),
        (replace(TRITON, onnxruntime=NO_ORT), Severity.OK, "auto takes Triton", ""),
    ],
)
def test_engine_choice_says_what_would_serve_and_why(
    facts: EngineFacts, status: Severity, found: str, advice: str
) -> None:
    """Triton where it can run, else embedded with the reason; a problem where what is asked for cannot serve."""
    finding = pick(engine.engine_findings(facts), "engine.choice")
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True)


def test_engine_onnxruntime_unusable_is_worse_beside_triton() -> None:
    """Our Triton backend needs it in its own environment; here the finding states the reason of the failure."""
    finding = pick(engine.engine_findings(replace(TRITON, onnxruntime=NO_ORT)), "engine.onnxruntime")
    assert (finding.status, "not installed" in finding.found) == (Severity.WARNING, True)


@pytest.mark.parametrize(
    ("runtime", "lacks_cuda", "status", "found", "advice"),
    [
        ({"why_not_on_gpu": "onnxruntime-gpu is not installed here"}, True, Severity.WARNING,
         "ONNX models run on the CPU: onnxruntime-gpu is not installed here", "make gpu"),
        ({"why_not_on_gpu": "a library of CUDA 13 or of cuDNN 9 is missing"}, False, Severity.WARNING,
         "ONNX models run on the CPU: a library of CUDA 13", "make gpu"),
        ({}, True, Severity.WARNING, "Triton's environment has no onnxruntime-gpu", "else penstock setup triton --gpu"),
        ({}, False, Severity.OK, "ONNX models run on the GPU", ""),
    ],
    ids=["no-package", "no-cudnn", "not-in-triton", "ready"],
)  # fmt: skip
def test_engine_onnx_on_a_gpu_says_what_is_missing(
    runtime: dict[str, str], *, lacks_cuda: bool, status: Severity, found: str, advice: str
) -> None:
    """With a driver, the finding states whether ONNX models use the GPU, and what to do if they do not."""
    facts = replace(TRITON, onnxruntime=replace(ORT, has_driver=True, **runtime), triton_lacks_cuda=lacks_cuda)
    finding = pick(engine.engine_findings(facts), "engine.onnx-gpu")
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True)


def test_engine_onnx_on_a_gpu_is_no_subject_without_a_driver() -> None:
    """Without NVIDIA's driver nothing is said of ONNX models on a GPU."""
    assert "engine.onnx-gpu" not in {one.id for one in engine.engine_findings(TRITON)}


def test_engine_probe_real_triton_is_found(triton_environment: Path, tmp_path: Path) -> None:
    """The bundled Triton and the real ONNX Runtime are described with their versions."""
    facts = engine.probe_engine(plan(tmp_path, engine="auto", engine_environment=triton_environment))
    assert facts.triton.startswith("Triton of nvidia-pytriton ") or "PATH" in facts.triton
    assert facts.onnxruntime.version
    assert "CPUExecutionProvider" in facts.onnxruntime.providers


def test_engine_probe_unreadable_files_are_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that this user may not read is none, with the file named."""

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/opt/lib/libpython3.11.so")

    monkeypatch.setattr(engine, "find_triton", refuse)
    facts = engine.probe_engine(plan(tmp_path, engine="auto"))
    assert facts.no_triton.startswith("/opt/lib/libpython3.11.so cannot be read (Permission denied)")
    assert not engine.runs_triton(plan(tmp_path, engine="auto"))


@pytest.mark.parametrize(("asked", "is_run"), [("embedded", False), ("http://h:1", False), ("triton", True)])
def test_runs_triton_follows_what_is_asked(tmp_path: Path, asked: str, is_run: bool) -> None:
    """Ports and shared memory of a Triton matter only where one would be started."""
    assert engine.runs_triton(plan(tmp_path, engine=asked)) is is_run
