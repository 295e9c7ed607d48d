"""The engine that `penstock up` would choose, and the ports that it would listen on."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil

from penstock.doctor.finding import Finding, Severity, StackPlan
from penstock.engines.triton.runtime import TritonRuntime, TritonUnavailable, find_triton
from penstock.network import family_of, listen_hosts

_CHILD_TIMEOUT_S = 8.0
_REINSTALL = "pip install --force-reinstall onnxruntime (in a checkout: remove .venv and `make up`)"
# In a process of its own: on a CPU that it was not built for, a native library ends the process that imports it.
_ONNXRUNTIME_SCRIPT = "import json, onnxruntime as o; print(json.dumps([o.__version__, o.get_available_providers()]))"


@dataclass(frozen=True, slots=True)
class OnnxRuntimeFacts:
    """version: None if it cannot be imported, with the reason in `failure`."""

    version: str | None
    providers: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """requested: auto, triton, embedded or a URL. triton: where it is and its version; "" where none can run.

    no_triton: why none can run, the finder's sentence.
    """

    requested: str
    triton: str
    no_triton: str
    onnxruntime: OnnxRuntimeFacts

    @property
    def is_remote(self) -> bool:
        """Whether the engine is an external server."""
        return self.requested.startswith(("http://", "https://"))


def runs_triton(plan: StackPlan) -> bool:
    """Whether `penstock up` would start a Triton of its own here."""
    if plan.engine not in ("auto", "triton"):
        return False
    return plan.engine == "triton" or isinstance(_find(plan), TritonRuntime)


def probe_engine(plan: StackPlan) -> EngineFacts:
    """Finds Triton as `penstock up` does, and asks ONNX Runtime for its providers."""
    found = _find(plan)
    runtime = probe_onnxruntime()
    if isinstance(found, TritonRuntime):
        return EngineFacts(plan.engine, _described(found), "", runtime)
    return EngineFacts(plan.engine, "", found, runtime)


def _find(plan: StackPlan) -> TritonRuntime | str:
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


def probe_onnxruntime() -> OnnxRuntimeFacts:
    """Its version and execution providers. Blocks for a few seconds at most."""
    try:
        installed = version("onnxruntime")
    except PackageNotFoundError:
        return OnnxRuntimeFacts(None, failure="it is not installed")
    program = (sys.executable, "-P", "-c", _ONNXRUNTIME_SCRIPT)
    try:
        completed = subprocess.run(program, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=True)
        release, providers = json.loads(completed.stdout)
    except subprocess.CalledProcessError as error:
        last = str(error.stderr).strip().splitlines()[-1:]
        return OnnxRuntimeFacts(None, failure=f"{installed}: {last[0] if last else f'ended with {error.returncode}'}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return OnnxRuntimeFacts(None, failure=f"{installed}: {error}")
    return OnnxRuntimeFacts(str(release), tuple(map(str, providers)))


def engine_findings(facts: EngineFacts) -> list[Finding]:
    """The engine that would be taken, then ONNX Runtime."""
    return [_engine(facts), _onnxruntime(facts)]


def _engine(facts: EngineFacts) -> Finding:
    if facts.is_remote:
        return Finding("engine.choice", Severity.OK, f"{facts.requested}, an external server (not contacted)")
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
# The gateway's own process is started with its run directory's settings, Triton with its region prefix.
_OURS = re.compile(r"/run-[0-9a-f]{12}/settings\.json$|shm-region-prefix-name=penstock_[0-9a-f]{12}_")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who listens. is_ours: it belongs to a stack that `penstock up` runs."""

    pid: int
    name: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class PortFacts:
    """flag: `http-port`, …, or `video`. why: why it cannot be listened on, an errno's name; "" where it can.

    holder: None if unknown.
    """

    flag: str
    host: str
    port: int
    why: str = ""
    holder: Holder | None = None


def probe_ports(plan: StackPlan) -> tuple[PortFacts, ...]:
    """Tries to listen on each for a moment; the engine's only where it would have a process of its own."""
    has_engine = runs_triton(plan)
    tried = [
        _facts(flag, host, port) for flag, host, port in [*_wanted(plan, has_engine), (VIDEO, LOOPBACK, VIDEO_PORT)]
    ]
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
    """Facts about the port, with the address that cannot be listened on, if any."""
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
    """By port; those of other users are visible to root only."""
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
    """What a person knows it by: `python -m http.server`, not the path of an interpreter."""
    shown = [os.path.basename(arguments[0]), *arguments[1:3]] if arguments else []
    return " ".join(shown)[:60]


def port_findings(facts: tuple[PortFacts, ...]) -> list[Finding]:
    """One line for those that are free, one for each that is not."""
    free = [_named(one) for one in facts if not one.why]
    ours = [one for one in facts if one.holder is not None and one.holder.is_ours]
    findings = [Finding("ports.free", Severity.OK, f"free: {' '.join(free)}")] if free else []
    if ours:
        shown = " ".join(map(_named, ours))
        findings.append(Finding("ports.ours", Severity.OK, f"a penstock runs here: {shown}"))
    return findings + [_taken(one) for one in facts if one.why and one not in ours]


def _named(facts: PortFacts) -> str:
    """The number, and of the one that `penstock up` does not listen on whose it is."""
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
    """Never more than a note: `penstock up` serves without it."""
    why = f"is taken by {_who(facts)}" if facts.why == "EADDRINUSE" else f"cannot be listened on ({facts.why})"
    advice = "`penstock up` does not need it; `penstock video run` does, or takes another with --api-port N"
    return Finding(name, Severity.NOTE, f"{where} {why}", advice)


def _who(facts: PortFacts) -> str:
    holder = facts.holder
    return f"{holder.name} (process {holder.pid})" if holder else "a process that only root may see"
