"""The engine of `penstock video`: a named gateway, the stack running on this host, or its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import structlog

from penstock.cli.gateway_client import GatewayClient, candidate_stacks, named_port, settings_or_fail
from penstock.cli.model_list import installed_models, unknown_model
from penstock.cli.terminal import one_line
from penstock.gateway.workers.running_stacks import UP_CHILD, RunningStack, ambiguity, is_bound, running_stacks
from penstock.gpu.mps.control import PIPE_DIRECTORY, MpsOptions
from penstock.models.catalogue import read_catalogue
from penstock.network import host_and_port
from penstock.protocol.errors import GatewayUnreachable, InferenceError
from penstock_video.infer.options import EngineAddress, RowMemory
from penstock_video.settings.models import EngineChoice, EngineSettings, VideoSettings, gateway_fault
from penstock_video.types import DecoderKind

GATEWAY_VARIABLE = "PENSTOCK_GATEWAY_URL"
START_TIMEOUT_S, STOP_TIMEOUT_S, HURRY_S = 180.0, 45.0, 5.0
_LOOK_S = 0.1
log = structlog.get_logger(component="video")
_DRIVER = Path("/dev/nvidiactl")
_LINES_SHOWN = 12
_FREE_PORTS = [
    word
    for flag in ("http", "grpc", "metrics", "engine-http", "engine-grpc", "engine-metrics")
    for word in (f"--{flag}-port", "0")
]


class EngineUnavailable(Exception):
    """There is no engine. The text is one sentence with the fix. lines: the engine's last output. code: exit status."""

    code = 1

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(map(one_line, lines))


class ModelUnknown(EngineUnavailable):
    """The settings name an unknown model."""

    code = 2


@contextmanager
def engine_for(
    settings: EngineSettings,
    models: Sequence[str],
    environ: Mapping[str, str],
    note: Callable[[str], None],
    *,
    shares_memory: bool = False,
) -> Iterator[EngineAddress]:
    """Runs the engine with the models until the block ends. note: called with what takes long. shares_memory: our own
    engine shares memory with its clients. Raises EngineUnavailable."""
    api_key = environ.get(settings.api_key_variable, "")
    gateway = settings.gateway or (environ.get(GATEWAY_VARIABLE, "") if settings.choice is EngineChoice.AUTO else "")
    if gateway:
        if fault := gateway_fault(gateway):
            raise EngineUnavailable(f"{GATEWAY_VARIABLE}: {fault}")
        place = EngineAddress(None, gateway, settings.grpc or grpc_beside(gateway), api_key)
        require_models(GatewayClient(place.http_url, api_key), models)
        yield place
        return
    why = "an"
    if settings.choice is EngineChoice.AUTO:
        stack_settings = settings_or_fail()
        if stacks := candidate_stacks(stack_settings):
            stack = _that_serves(models, stacks, api_key)
            if why := ambiguity(stacks, stack, stack_settings.home_path):
                log.warning(why, choose_by="--url URL or PENSTOCK_HTTP_PORT")
            yield place_of(stack, api_key)
            return
        why = f"no stack runs {f'on port {port}' if (port := named_port(stack_settings)) else 'here'}: an"
    require_installed(models)
    note(f"{why} engine of this run's own starts, with {', '.join(models)}, which takes a while")
    with OwnEngine(settings.choice, models, environ, shares_memory=shares_memory) as own:
        yield place_of(own.stack, api_key, is_own=True)


def place_of(stack: RunningStack, api_key: str, *, is_own: bool = False) -> EngineAddress:
    """The stack's address for a client process."""
    return EngineAddress(
        stack.run_dir, stack.http_url, stack.grpc_address, api_key, is_own=is_own, mps_directory=stack.mps_directory
    )


def share_card(place: EngineAddress, environ: MutableMapping[str, str]) -> None:
    """Makes this process a client of the engine's MPS daemon if both use the same card. Call it before CUDA starts.

    A pipe directory that is set in the environment stays.
    """
    if not place.mps_directory or environ.get(PIPE_DIRECTORY):
        return
    client = MpsOptions(Path(place.mps_directory)).client_environ(environ)
    for gone in environ.keys() - client.keys():
        del environ[gone]
    environ.update(client)


def grpc_beside(gateway: str) -> str:
    """HOST:PORT of its gRPC, the next port."""
    parts = urlsplit(gateway)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return host_and_port(parts.hostname or "", port + 1)


def joinable(stacks: Sequence[RunningStack]) -> RunningStack | None:
    """The newest running stack that is not another command's own engine."""
    return next((stack for stack in stacks if not is_bound(stack)), None)


def _that_serves(models: Sequence[str], stacks: Sequence[RunningStack], api_key: str) -> RunningStack:
    """The newest stack that serves all models. Raises the newest stack's EngineUnavailable if none does."""
    refusals = []
    for stack in stacks:
        try:
            require_models(GatewayClient(stack.http_url, api_key), models)
        except EngineUnavailable as error:
            refusals.append(error)
        else:
            return stack
    raise refusals[0]


def require_models(gateway: GatewayClient, models: Sequence[str]) -> None:
    """Raises EngineUnavailable with the fix if the gateway does not serve a model, ModelUnknown if it has none."""
    try:
        rows = gateway.repository_index()
    except GatewayUnreachable as error:
        raise EngineUnavailable(
            f"nothing answers at {gateway.url}: start it there with `penstock up`, or give its address with --url"
        ) from error
    except InferenceError as error:
        raise EngineUnavailable(str(error)) from error
    ready = {row.name for row in rows if row.state == "READY"}
    reasons = {row.name: row.reason for row in rows}
    for name in models:
        if name in ready:
            continue
        if name not in reasons:
            raise ModelUnknown(unknown_model(name, ready, f"at {gateway.url}", url=gateway.url))
        why = f" ({reasons[name]})" if reasons[name] else ""
        raise EngineUnavailable(
            f"{name} is not loaded at {gateway.url}{why}: "
            f"load it with `penstock models load {name} --url {gateway.url}`"
        )


def require_installed(models: Sequence[str]) -> None:
    """Raises ModelUnknown with the fix if this machine has no such model."""
    settings = settings_or_fail()
    there = {model.name for model in installed_models(settings)}
    for name in models:
        if name not in there:
            hint = " (or --from a file that you have)" if name in read_catalogue() else ""
            raise ModelUnknown(unknown_model(name, there, "on this machine") + hint)


class OwnEngine:
    """`penstock up` as a child process on free loopback ports, with only the needed models. Ends with the block.

    Construct it in the main thread: PR_SET_PDEATHSIG ends it when the thread that started it ends.
    """

    stack: RunningStack

    def __init__(
        self, choice: EngineChoice, models: Sequence[str], environ: Mapping[str, str], *, shares_memory: bool = False
    ) -> None:
        self._command = own_engine_command(choice, models, shares_memory=shares_memory)
        self._environ = environ
        self._lines: deque[str] = deque(maxlen=200)

    def __enter__(self) -> "OwnEngine":
        """Returns when it is ready. Raises EngineUnavailable with its last output if it fails."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=dict(self._environ), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        threading.Thread(target=self._collect, args=(self._process.stdout,), name="engine-log", daemon=True).start()
        threading.Thread(target=_import_program, name="imports").start()
        try:
            self.stack = self._ready()
        except BaseException:
            self._stop(HURRY_S)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop(HURRY_S if kind is KeyboardInterrupt else STOP_TIMEOUT_S)

    def _collect(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))

    def _ready(self) -> RunningStack:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if (code := self._process.poll()) is not None:
                time.sleep(_LOOK_S)  # its last words are on their way
                raise EngineUnavailable(f"the engine ended at once, with code {code}; it said:", self._last_lines())
            found = [stack for stack in running_stacks() if stack.process_id == self._process.pid]
            if found:
                return found[0]
            time.sleep(_LOOK_S)
        raise EngineUnavailable(f"the engine was not ready within {START_TIMEOUT_S:g} s; it said:", self._last_lines())

    def _last_lines(self) -> list[str]:
        return list(self._lines)[-_LINES_SHOWN:]

    def _stop(self, max_wait_s: float) -> None:
        """Stops it with its children, gracefully, then by force. Ctrl-C meanwhile forces it."""
        try:
            self._process.terminate()
            self._process.wait(max_wait_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)


def may_share_card(settings: VideoSettings) -> bool:
    """Whether rows may be in GPU memory for our own engine: it must share memory with its clients."""
    decoders = {source.config.decoder for source in settings.sources} or {DecoderKind.AUTO}
    may_decode = decoders != {DecoderKind.CPU} and settings.gpu.hand_over is not RowMemory.HOST
    return may_decode and _DRIVER.exists()


def own_engine_command(choice: EngineChoice, models: Sequence[str], *, shares_memory: bool = False) -> list[str]:
    """The command line of our own engine."""
    bond = [sys.executable, "-P", "-m", UP_CHILD, str(os.getpid()), "up", "--host", "127.0.0.1", *_FREE_PORTS]
    bond += ["--console", "off"]
    shared = ["--allow-client-shm"] if shares_memory else []
    return [*bond, "--engine", choice.value, "--models", ",".join(models), *shared]


def _import_program() -> None:
    """Imports the decoding, tracking and drawing modules, which takes seconds, while the engine starts."""
    with suppress(
        ImportError, AttributeError
    ):  # of two threads that import the same; the main thread raises what fails
        import_module("penstock_video.main")
        import_module("penstock_video.track.bytetrack")
