"""The engine and the ports that `penstock up` would use."""

import errno
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import psutil

from penstock.doctor.finding import Finding, Severity, StackPlan
from penstock.engines.ort_probe import installed_packages
from penstock.engines.triton.runtime import TritonRuntime, TritonUnavailable, find_triton
from penstock.network import family_of, listen_hosts
from penstock.protocol.extensions import is_extension_name

_CHILD_TIMEOUT_S = 8.0
_REINSTALL = "pip install --force-reinstall onnxruntime (in a checkout: remove .venv and `make up`)"
_ONNXRUNTIME_PROBE = (sys.executable, "-P", "-m", "penstock.engines.ort_probe")
_MAKE_GPU = "run make gpu in a checkout, else pip install 'penstock[gpu]' (CUDA 13: driver 580, Turing or newer)"
_SETUP_GPU = (
    "run make gpu in a checkout, else penstock setup triton --gpu; models with kind KIND_GPU run on the CPU until then"
)


@dataclass(frozen=True, slots=True)
class OnnxRuntimeFacts:
    """version: None if the import fails; the reason is in `failure`.

    has_driver: NVIDIA's driver is loaded. why_not_on_gpu: why ONNX models run on the CPU although it is; else empty.
    """

    version: str | None
    providers: tuple[str, ...] = ()
    failure: str = ""
    has_driver: bool = False
    why_not_on_gpu: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """requested: auto, triton, embedded or a URL."""

    requested: str
    triton: str  # Triton's version and location; empty if none can run
    no_triton: str  # why none can run
    onnxruntime: OnnxRuntimeFacts
    triton_lacks_cuda: bool = False  # the environment of our onnxruntime backend has no onnxruntime-gpu

    @property
    def is_remote(self) -> bool:
        """Whether the engine is an external server."""
        return self.requested.startswith(("http://", "https://"))


def runs_triton(plan: StackPlan) -> bool:
    """Whether `penstock up` would start Triton here."""
    if plan.engine not in ("auto", "triton"):
        return False
    return plan.engine == "triton" or isinstance(_find(plan), TritonRuntime)


def probe_engine(plan: StackPlan) -> EngineFacts:
    """Finds Triton as `penstock up` does, and queries ONNX Runtime for its providers."""
    found = _find(plan)
    runtime = probe_onnxruntime()
    if isinstance(found, TritonRuntime):
        return EngineFacts(plan.engine, _described(found), "", runtime, _lacks_cuda(found))
    return EngineFacts(plan.engine, "", found, runtime)


def _find(plan: StackPlan) -> TritonRuntime | str:
    """Triton, or the reason why none can run."""
    try:
        return find_triton(environment=plan.engine_environment)
    except TritonUnavailable as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror}); let this user read it"


def _lacks_cuda(runtime: TritonRuntime) -> bool:
    return runtime.wheel is not None and not any(runtime.wheel.site_packages.glob("onnxruntime_gpu-*.dist-info"))


def _described(runtime: TritonRuntime) -> str:
    if runtime.wheel is None:
        release = os.environ.get("NVIDIA_TRITON_SERVER_VERSION", "")  # set in NVIDIA's image
        return f"tritonserver{release and f' {release}'} on PATH ({runtime.binary})"
    wheels = sorted(runtime.wheel.site_packages.glob("nvidia_pytriton-*.dist-info"))
    release = wheels[0].name.removesuffix(".dist-info").partition("-")[2] if wheels else "of unknown version"
    return f"Triton of nvidia-pytriton {release} in {runtime.wheel.environment}"


def probe_onnxruntime() -> OnnxRuntimeFacts:
    """ONNX Runtime's version and execution providers. Blocks for _CHILD_TIMEOUT_S at most."""
    packages = installed_packages()
    if not packages:
        return OnnxRuntimeFacts(None, failure="it is not installed")
    installed = " and ".join(f"{name} {release}" for name, release in sorted(packages.items()))
    try:
        completed = subprocess.run(
            _ONNXRUNTIME_PROBE, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=True
        )
        found = msgspec.json.decode(completed.stdout, type=_Probed)
    except subprocess.CalledProcessError as error:
        last = str(error.stderr).strip().splitlines()[-1:]
        return OnnxRuntimeFacts(None, failure=f"{installed}: {last[0] if last else f'ended with {error.returncode}'}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return OnnxRuntimeFacts(None, failure=f"{installed}: {error}")
    return OnnxRuntimeFacts(
        found.version, found.providers, has_driver=found.has_driver, why_not_on_gpu=found.why_not_on_gpu
    )


class _Probed(msgspec.Struct):
    """What the probe's process prints."""

    version: str
    providers: tuple[str, ...]
    has_driver: bool
    why_not_on_gpu: str


def engine_findings(facts: EngineFacts) -> list[Finding]:
    """The chosen engine, ONNX Runtime, and whether ONNX models can use a GPU that is here."""
    on_gpu = [_onnx_on_gpu(facts)] if facts.onnxruntime.has_driver and not facts.is_remote else []
    return [_engine(facts), _onnxruntime(facts), *on_gpu]


def _onnx_on_gpu(facts: EngineFacts) -> Finding:
    name, why = "engine.onnx-gpu", facts.onnxruntime.why_not_on_gpu
    if why:
        return Finding(name, Severity.WARNING, f"ONNX models run on the CPU: {why}", _MAKE_GPU)
    if facts.triton_lacks_cuda and facts.requested != "embedded":
        found = "the embedded engine runs ONNX models on the GPU; Triton's environment has no onnxruntime-gpu"
        return Finding(name, Severity.WARNING, found, _SETUP_GPU)
    return Finding(name, Severity.OK, "ONNX models run on the GPU: CUDA and cuDNN are found")


def _engine(facts: EngineFacts) -> Finding:
    if facts.is_remote:
        return Finding("engine.choice", Severity.OK, f"{facts.requested}, an external server (not contacted)")
    if is_extension_name(facts.requested):
        return Finding("engine.choice", Severity.OK, f"{facts.requested}, an engine of your own (not loaded)")
    if facts.requested != "embedded" and facts.triton:
        return Finding("engine.choice", Severity.OK, f"{facts.requested} takes {facts.triton}")
    why, _, remedy = facts.no_triton.rpartition("; ")
    if facts.requested == "triton":
        return Finding("engine.choice", Severity.PROBLEM, why, remedy)
    embedded = f"ONNX Runtime {facts.onnxruntime.version} in the gateway's process"
    if facts.onnxruntime.version is None:
        found = f"no engine: {why or 'embedded was requested'}, and ONNX Runtime cannot be used"
        return Finding("engine.choice", Severity.PROBLEM, found, _REINSTALL)
    if facts.requested == "embedded":
        return Finding("engine.choice", Severity.OK, f"embedded: {embedded}")
    elsewhere = "models of other backends need a Triton elsewhere: penstock up --engine http://HOST:8000"
    advice = "`penstock setup triton` installs Triton" if "penstock setup" in remedy else elsewhere
    return Finding("engine.choice", Severity.NOTE, f"auto takes embedded ({embedded}), because {why}", advice)


def _onnxruntime(facts: EngineFacts) -> Finding:
    runtime = facts.onnxruntime
    if runtime.version is None:
        status = Severity.WARNING if facts.triton else Severity.NOTE
        return Finding("engine.onnxruntime", status, f"ONNX Runtime: {runtime.failure}", _REINSTALL)
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in runtime.providers)
    return Finding("engine.onnxruntime", Severity.OK, f"ONNX Runtime {runtime.version}: {providers}")


VIDEO = "video"
VIDEO_PORT = 8010
LOOPBACK = "127.0.0.1"
# The gateway process has its run directory's settings as argument, the video program the directory, Triton its prefix.
_OURS = re.compile(
    r"/run-[0-9a-f]{12}(/settings\.json)?$|shm-region-prefix-name=penstock_[0-9a-f]{12}_|^penstock\.cli\.main$"
)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port. is_ours: it belongs to a stack of `penstock up`."""

    pid: int
    name: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class PortFacts:
    """flag: `http-port`, …, or `video`."""

    flag: str
    host: str
    port: int
    why: str = ""  # the errno's name if it cannot be bound
    holder: Holder | None = None  # None if unknown


def probe_ports(plan: StackPlan) -> tuple[PortFacts, ...]:
    """Binds each port briefly. The engine's ports only if the engine would be a process of its own."""
    has_engine = runs_triton(plan)
    video = [] if plan.ports.get("video-port") == VIDEO_PORT else [(VIDEO, LOOPBACK, VIDEO_PORT)]
    tried = [_facts(flag, host, port) for flag, host, port in [*_wanted(plan, has_engine), *video]]
    if all(one.why != "EADDRINUSE" for one in tried):
        return tuple(tried)
    holders = _holders({one.port for one in tried})
    return tuple(PortFacts(one.flag, one.host, one.port, one.why, holders.get(one.port)) for one in tried)


def _wanted(plan: StackPlan, has_engine: bool) -> list[tuple[str, str, int]]:
    return [
        (flag, LOOPBACK if flag.startswith("engine") else plan.host, port)
        for flag, port in plan.ports.items()
        if port and (has_engine or not flag.startswith("engine"))
    ]


def _facts(flag: str, host: str, port: int) -> PortFacts:
    hosts = (host,) if flag.startswith("engine") else listen_hosts(host)
    tried = [PortFacts(flag, each, port, _try(each, port)) for each in hosts]
    return next((one for one in tried if one.why), tried[0])


def _try(host: str, port: int) -> str:
    try:
        with socket.socket(family_of(host)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except socket.gaierror:
        return "EADDRNOTAVAIL"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""


def _holders(ports: set[int]) -> dict[int, Holder]:
    """Listening processes by port. Those of other users are visible only to root."""
    found: dict[int, Holder] = {}
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return found
    for connection in connections:
        port = connection.laddr.port if connection.laddr else 0
        if connection.status == psutil.CONN_LISTEN and connection.pid and port in ports:
            found[port] = _holder(connection.pid)
    return found


def _holder(pid: int) -> Holder:
    try:
        process = psutil.Process(pid)
        arguments = process.cmdline()
        return Holder(pid, _program(arguments) or process.name(), any(_OURS.search(argument) for argument in arguments))
    except (psutil.Error, OSError):
        return Holder(pid, "a process", False)


def _program(arguments: list[str]) -> str:
    """A short command line: `python -m http.server`, without the interpreter's path."""
    words = [word for word in arguments[1:] if word != "-P"]
    shown = [os.path.basename(arguments[0]), *words[:2]] if arguments else []
    return " ".join(shown)[:60]


def port_findings(facts: tuple[PortFacts, ...]) -> list[Finding]:
    """One finding for all free ports, and one for each taken port."""
    free = [_named(one) for one in facts if not one.why]
    ours = [one for one in facts if one.holder is not None and one.holder.is_ours]
    findings = [Finding("ports.free", Severity.OK, f"free: {' '.join(free)}")] if free else []
    if ours:
        shown = " ".join(map(_named, ours))
        findings.append(Finding("ports.ours", Severity.OK, f"a penstock runs here: {shown}"))
    return findings + [_taken(one) for one in facts if one.why and one not in ours]


def _named(facts: PortFacts) -> str:
    """The port, with a remark if `penstock up` does not use it."""
    return f"{facts.port} (for penstock video)" if facts.flag == VIDEO else f"{facts.port}"


def _taken(facts: PortFacts) -> Finding:
    name = f"ports.{facts.flag.removesuffix('-port').replace('-', '_')}"
    where = f"{facts.host} port {facts.port}"
    if facts.flag == VIDEO:
        return _taken_from_video(name, where, facts)
    if facts.why == "EADDRNOTAVAIL":
        return Finding(
            name, Severity.PROBLEM, f"{where}: not an address of this machine", "choose another: --host 127.0.0.1"
        )
    if facts.why == "EACCES":
        return Finding(name, Severity.PROBLEM, f"{where}: root only", f"choose one over 1023: --{facts.flag} N")
    if facts.why != "EADDRINUSE":
        return Finding(name, Severity.PROBLEM, f"{where}: {facts.why}", f"choose another port: --{facts.flag} N")
    advice = f"stop what holds it, or choose another: penstock up --{facts.flag} N"
    return Finding(name, Severity.PROBLEM, f"{where} is taken by {_who(facts)}", advice)


def _taken_from_video(name: str, where: str, facts: PortFacts) -> Finding:
    """Only a note, because `penstock up` does not need this port."""
    why = f"is taken by {_who(facts)}" if facts.why == "EADDRINUSE" else f"cannot be listened on ({facts.why})"
    advice = "`penstock up` does not need it; `penstock video run` does, or takes another with --api-port N"
    return Finding(name, Severity.NOTE, f"{where} {why}", advice)


def _who(facts: PortFacts) -> str:
    holder = facts.holder
    return f"{holder.name} (process {holder.pid})" if holder else "a process that only root may see"
