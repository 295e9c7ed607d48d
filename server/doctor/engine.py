"""Which engine `penstock up` would take here, and why."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from server.backends.triton_runtime import TritonRuntime, TritonUnavailable, find_triton
from server.doctor.finding import Finding, Status
from server.doctor.plan import Plan

_CHILD_TIMEOUT_S = 8.0
# In a process of its own: on a CPU that it was not built for, a native library ends the process that imports it.
_ASK_ONNXRUNTIME = "import json, onnxruntime as o; print(json.dumps([o.__version__, o.get_available_providers()]))"


@dataclass(frozen=True, slots=True)
class OnnxRuntimeFacts:
    """version: None where it cannot be imported; `failure` says why then."""

    version: str | None
    providers: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """asked: auto, triton, embedded or a URL. triton: where it is and its version; "" where none can run.

    no_triton: why none can run, the finder's sentence.
    """

    asked: str
    triton: str
    no_triton: str
    onnxruntime: OnnxRuntimeFacts

    @property
    def is_remote(self) -> bool:
        """Whether somebody else runs the engine."""
        return self.asked.startswith(("http://", "https://"))


def runs_triton(plan: Plan) -> bool:
    """Whether `penstock up` would start a Triton of its own here."""
    if plan.engine not in ("auto", "triton"):
        return False
    return plan.engine == "triton" or isinstance(_find(plan), TritonRuntime)


def probe(plan: Plan) -> EngineFacts:
    """Finds Triton as `penstock up` does, and asks ONNX Runtime for its providers."""
    found = _find(plan)
    runtime = ask_onnxruntime()
    if isinstance(found, TritonRuntime):
        return EngineFacts(plan.engine, _described(found), "", runtime)
    return EngineFacts(plan.engine, "", found, runtime)


def _find(plan: Plan) -> TritonRuntime | str:
    """Triton, or the sentence on why none can run."""
    try:
        return find_triton(environment=plan.engine_environment)
    except TritonUnavailable as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror}); let this user read it"


def _described(runtime: TritonRuntime) -> str:
    if runtime.wheel is None:
        release = os.environ.get("NVIDIA_TRITON_SERVER_VERSION", "")  # NVIDIA's image sets it
        return f"tritonserver{release and f' {release}'} on PATH ({runtime.binary})"
    wheels = sorted(runtime.wheel.site_packages.glob("nvidia_pytriton-*.dist-info"))
    release = wheels[0].name.removesuffix(".dist-info").partition("-")[2] if wheels else "of unknown version"
    return f"Triton of nvidia-pytriton {release} in {runtime.wheel.environment}"


def ask_onnxruntime() -> OnnxRuntimeFacts:
    """Its version and execution providers. Blocks for a few seconds at most."""
    try:
        installed = version("onnxruntime")
    except PackageNotFoundError:
        return OnnxRuntimeFacts(None, failure="it is not installed")
    program = (sys.executable, "-P", "-c", _ASK_ONNXRUNTIME)
    try:
        asked = subprocess.run(program, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=True)
        release, providers = json.loads(asked.stdout)
    except subprocess.CalledProcessError as error:
        last = str(error.stderr).strip().splitlines()[-1:]
        return OnnxRuntimeFacts(None, failure=f"{installed}: {last[0] if last else f'ended with {error.returncode}'}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return OnnxRuntimeFacts(None, failure=f"{installed}: {error}")
    return OnnxRuntimeFacts(str(release), tuple(map(str, providers)))


def findings_of(facts: EngineFacts) -> list[Finding]:
    """The engine that would be taken, then ONNX Runtime."""
    return [_engine(facts), _onnxruntime(facts)]


def _engine(facts: EngineFacts) -> Finding:
    if facts.is_remote:
        return Finding("engine.choice", Status.OK, f"{facts.asked}, which somebody else runs (not asked now)")
    if facts.asked != "embedded" and facts.triton:
        return Finding("engine.choice", Status.OK, f"{facts.asked} takes {facts.triton}")
    why, _, way_out = facts.no_triton.rpartition("; ")
    if facts.asked == "triton":
        return Finding("engine.choice", Status.PROBLEM, why, way_out)
    embedded = f"ONNX Runtime {facts.onnxruntime.version} in the gateway's process"
    if facts.onnxruntime.version is None:
        found = f"no engine: {why or 'embedded is asked for'}, and ONNX Runtime cannot be used"
        return Finding("engine.choice", Status.PROBLEM, found, "remove .venv and `make up`")
    if facts.asked == "embedded":
        return Finding("engine.choice", Status.OK, f"embedded: {embedded}")
    elsewhere = "models of other backends need a Triton elsewhere: penstock up --engine http://HOST:8000"
    advice = "`make up` builds Triton's environment" if "`make up`" in way_out else elsewhere
    return Finding("engine.choice", Status.NOTE, f"auto takes embedded ({embedded}), because {why}", advice)


def _onnxruntime(facts: EngineFacts) -> Finding:
    runtime = facts.onnxruntime
    if runtime.version is None:
        status = Status.WARNING if facts.triton else Status.NOTE
        return Finding("engine.onnxruntime", status, f"ONNX Runtime: {runtime.failure}", "remove .venv and `make up`")
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in runtime.providers)
    return Finding("engine.onnxruntime", Status.OK, f"ONNX Runtime {runtime.version}: {providers}")
