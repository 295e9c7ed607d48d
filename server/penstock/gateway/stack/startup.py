"""Checks and decisions before anything starts: access, engine, ports, MPS, profiling, repositories, run directory."""

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from penstock.engines.call_options import HeaderFileError, read_header_file
from penstock.engines.config_pbtxt import gpu_instances, read_config
from penstock.engines.run_directory import RunDirectory, RunDirectoryRefused, claim_run_directory
from penstock.engines.torch_serving.parameters import whole_number
from penstock.engines.triton.endpoints import pick_free_ports
from penstock.engines.triton.runtime import (
    TritonRuntime,
    TritonUnavailable,
    default_environment,
    find_triton,
    is_special,
)
from penstock.gateway.audit import AuditLog, AuditLogError
from penstock.gateway.auth.access_file import AccessFileError, AccessRules, EmptyAccessFile, read_access_file
from penstock.gateway.auth.api_keys import ApiKeyRing, InvalidApiKey, key_of_hashed
from penstock.gateway.batching.options import NO_OPTIONS, OptionTexts, read_options
from penstock.gateway.settings import Settings, port_of_engine
from penstock.gateway.stack.mps import MpsPlan, MpsRequest, plan_card_mps, plan_mps, this_machine
from penstock.gateway.workers.running_stacks import run_folders, running_stacks
from penstock.gpu.cards import Card
from penstock.gpu.mps.control import MpsUnavailable
from penstock.gpu.mps.limits import ModelClients
from penstock.gpu.profiling import ProfilerMissing, ProfilerMode, Profiling, plan_profiling
from penstock.logs import get_logger
from penstock.network import PortTaken, bind, bind_all
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.extensions import ExtensionError
from penstock.protocol.inference import BatchOwner
from penstock.tls import Certificates, TlsFileError

log = get_logger("stack")
PORT_TRIES = 8  # free ports, until those of the further engines are free, too
ENGINE_PORTS = ("engine_http_port", "engine_grpc_port", "engine_metrics_port")


class CannotStart(Exception):
    """The stack cannot start. The message is one sentence with the fix."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One Triton of the stack. card: None for one that has every visible card. mps: None without MPS. index: of the
    card, among several."""

    card: Card | None = None
    mps: MpsPlan | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Settings with a decided engine and MPS, never `auto`. triton: to start, or None. mps: None without MPS.

    cards: the chosen ones, if they are several or `gpus` names them; each of several gets a Triton of its own.
    card_mps: by card, of several. homes: labels of the cards by model, for models that are not on all.
    placements: each model's cards, and why.
    origins: of the settings; see settings_origins.
    """

    settings: Settings
    triton: TritonRuntime | None = None
    mps: MpsPlan | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    cards: tuple[Card, ...] = ()
    card_mps: Mapping[Card, MpsPlan] = field(default_factory=dict)
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    placements: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_engine_per_card(self) -> bool:
        return self.triton is not None and len(self.cards) > 1

    @property
    def engine_plans(self) -> tuple[EnginePlan, ...]:
        """The Tritons to start."""
        if not self.has_engine_per_card:
            return (EnginePlan(None, self.mps),)
        return tuple(EnginePlan(card, self.card_mps.get(card), index) for index, card in enumerate(self.cards))


def check_access(settings: Settings) -> None:
    """Raises CannotStart if remote clients would have all roles, no client would have any, or a file is unusable."""
    if settings.is_exposed:
        raise CannotStart(
            f"{settings.host} can be reached from other machines, and there are no API keys: make one with `penstock "
            "keys new NAME --file access.toml` and give --access-file access.toml, or say what all may do with "
            "--anonymous infer,read"
        )
    if not settings.has_keys and not settings.anonymous_roles:
        raise CannotStart(
            "no client may do anything: --anonymous is none and there are no API keys; set PENSTOCK_API_KEYS to "
            "NAME:ROLE+ROLE:SECRET (PENSTOCK_API_KEY, without an S, is what a client sends), or give --access-file"
        )
    try:
        rules = _access_rules(settings.access_file) if settings.access_file is not None else AccessRules()
        ApiKeyRing((*map(key_of_hashed, settings.api_keys), *rules.keys))
        Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        AuditLog(settings.audit_log).close()
    except (AccessFileError, AuditLogError, InvalidApiKey, TlsFileError) as error:
        raise CannotStart(str(error)) from error


def _access_rules(file: Path) -> AccessRules:
    """The file's rules; empty rules for a file without keys, which may be added later. Raises AccessFileError."""
    try:
        return read_access_file(file)
    except EmptyAccessFile as error:
        log.warning(f"no client has a key: {error}")
        return AccessRules()


def choose_engine(settings: Settings) -> EngineChoice:
    """The engine for every process of the stack. Raises CannotStart if it is missing or its headers are invalid."""
    if settings.engine_header_file is not None:
        try:
            read_header_file(settings.engine_header_file)
        except HeaderFileError as error:
            raise CannotStart(f"--engine-header-file: {error}") from error
    if settings.engine_class:
        from penstock.engines.embedded.user_engine import load_engine_class  # here because it loads user's code

        try:
            load_engine_class(settings.engine_class)
        except ExtensionError as error:
            raise CannotStart(f"--engine {settings.engine_class}: {error}") from error
    if settings.engine_is_external or settings.engine_is_embedded:
        return EngineChoice(settings)
    environment = settings.engine_environment or default_environment(Path(sys.prefix), settings.home_path)
    try:
        triton = find_triton(environment=environment)
    except TritonUnavailable as error:
        if settings.engine == "triton":
            raise CannotStart(str(error)) from error
        log.info(f"engine: embedded, since {error}")
        return EngineChoice(settings.model_copy(update={"engine": "embedded"}))
    return EngineChoice(
        settings.model_copy(update={"engine": "triton"}), replace(triton, max_pixels=settings.max_pixels)
    )


def choose_mps(choice: EngineChoice) -> EngineChoice:
    """The choice with an MPS plan if wanted; `auto` continues without MPS if unavailable. Raises CannotStart."""
    settings = choice.settings
    if settings.mps == "off":
        if settings.mps_active_thread_percentage or settings.mps_pinned_memory:
            raise CannotStart(
                "--mps-active-thread-percentage and --mps-pinned-memory limit clients of MPS, and --mps is off: say "
                "--mps on, or auto, or leave them out"
            )
        return choice
    without = replace(choice, settings=settings.model_copy(update={"mps": "off"}))
    is_must = settings.mps == "on"
    try:
        if choice.triton is None:
            raise MpsUnavailable(
                "MPS shares a GPU among Triton's models, and no Triton is started here; leave --mps out"
            )
        request = MpsRequest(
            is_must, settings.mps_directory, settings.mps_active_thread_percentage, settings.mps_pinned_memory
        )
        wanted = model_clients(settings)
        if choice.has_engine_per_card:
            plans = plan_card_mps(request, wanted, this_machine(), choice.cards, choice.homes)
            return replace(choice, settings=settings.model_copy(update={"mps": "on"}), card_mps=plans)
        plan = plan_mps(request, wanted, this_machine())
    except MpsUnavailable as error:
        if is_must:
            raise CannotStart(str(error)) from error
        log.info(f"without MPS, since {error}")
        return without
    return replace(choice, settings=settings.model_copy(update={"mps": "on"}), mps=plan)


def model_clients(settings: Settings) -> list[ModelClients]:
    """GPU processes of the models to load. Unreadable configs count as none."""
    return [
        client
        for repository in settings.repositories
        for config in sorted(repository.glob("*/config.pbtxt"))
        if settings.models is None or config.parent.name in settings.models
        for client in _clients_of(config, settings.batching.get(config.parent.name, NO_OPTIONS))
    ]


def _clients_of(path: Path, batching: OptionTexts) -> list[ModelClients]:
    rows = [ModelClients(path.parent.name, row.count, row.cards) for row in gpu_instances(path)]
    try:
        config = read_config(path)
        options = read_options(config, batching)
    except InvalidRequest:  # it is reported when the model is loaded
        return rows
    own = config.parameters.get("active-thread-percentage", "")
    is_shared = config.parameters.get("program-process", "").strip().lower() == "shared"
    return [
        replace(
            row,
            count=1 if is_shared else row.count,
            max_rows=options.max_batch_size,
            is_merged=options.owner is not BatchOwner.OFF and options.max_batch_size > 1,
            is_checked=config.backend == "torch" and config.parameters.get("check-answers", "1") != "0",
            threads=whole_number(own.strip(), 100),
        )
        for row in rows
    ]


def resolve_ports(settings: Settings, engine_count: int = 1) -> Settings:
    """The settings with free port numbers. Raises CannotStart if one is in use. engine_count: Tritons; see Settings.

    Triton checks no keys, so its ports stay closed if the gateway restricts clients.
    """
    if settings.restricts_access:
        settings = _without_engine_ports(settings)
    listeners: list[socket.socket] = []
    ports: dict[str, int] = {}
    refused: dict[str, PortTaken] = {}
    try:
        for name in _listening(settings):
            wanted = getattr(settings, name)
            for port in (wanted,) if wanted else pick_free_ports("127.0.0.1", 1 if engine_count == 1 else PORT_TRIES):
                ports[name] = port
                try:
                    listeners += _bound(settings.host, port, name, engine_count)
                except PortTaken as error:
                    refused[name] = error
                else:
                    refused.pop(name, None)
                    break
    finally:
        for listener in listeners:
            listener.close()
    if refused:
        raise CannotStart(_refusal(refused, ports)) from next(iter(refused.values()))
    return settings.model_copy(update=ports)


def _listening(settings: Settings) -> list[str]:
    """The settings of the ports that are opened."""
    names = ["http_port", "grpc_port", "metrics_port"]
    if settings.served_console_port is not None:
        names.append("console_port")
    if settings.video:
        names.append("video_port")
    if settings.engine_has_process:
        names += [name for name in ENGINE_PORTS if getattr(settings, name) is not None]
    return names


def _bound(host: str, port: int, name: str, engine_count: int) -> list[socket.socket]:
    """Listeners on the port, and on those of the further engines. Raises PortTaken."""
    if not name.startswith("engine"):
        return list(bind_all(host, port, flag=_flag_of(name)))
    bound: list[socket.socket] = []
    try:
        for index in range(engine_count):
            bound.append(bind("127.0.0.1", port_of_engine(port, index) or 0, flag=_flag_of(name)))
    except PortTaken:
        for listener in bound:
            listener.close()
        raise
    return bound


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refusal(refused: Mapping[str, PortTaken], ports: Mapping[str, int]) -> str:
    """One sentence of all ports that cannot be had, and of the stack of this user that has them."""
    text = str(next(iter(refused.values())))
    if len(refused) > 1:
        taken = ", ".join(str(ports[name]) for name in refused)
        flags = " ".join(f"{_flag_of(name)} 0" for name in refused)
        text = f"{text}. Ports {taken} cannot be had; any free ones are taken with {flags}"
    if "console_port" in refused:
        text += ", or leave the console out with --console off"
    http_port = ports["http_port"] if "http_port" in refused else None
    stack = next((each for each in running_stacks() if urlsplit(each.http_url).port == http_port), None)
    return f"a Penstock runs already at {stack.label}, see `penstock status`: {text}" if stack is not None else text


def _without_engine_ports(settings: Settings) -> Settings:
    given = [name for name in ENGINE_PORTS if getattr(settings, name) is not None]
    if given and settings.engine_has_process:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        log.warning(
            f"{flags}: not opened. Triton checks no keys, and the gateway has API keys or restricts anonymous clients; "
            "clients use the gateway's ports"
        )
    return settings.model_copy(update=dict.fromkeys(ENGINE_PORTS))


def choose_profiling(choice: EngineChoice, name: str) -> Profiling | None:
    """How Triton runs under a profiler; None for no profiler. name: of its reports. Raises CannotStart."""
    settings = choice.settings
    if settings.profile is not ProfilerMode.OFF and choice.triton is None:
        raise CannotStart("profile is of a Triton that is started here; leave it out, or use --engine triton")
    try:
        profiling = plan_profiling(settings.profile, settings.home_path.absolute() / "profiles", name)
        if profiling is not None and profiling.report is not None:
            profiling.report.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except ProfilerMissing as error:
        raise CannotStart(str(error)) from error
    except OSError as error:
        raise CannotStart(f"no folder for profiles: {error}; set --home to one that you may write") from error
    return profiling


def check_repositories(settings: Settings) -> tuple[Path, ...]:
    """Readable model repositories. Raises CannotStart if one is missing, or a model is duplicate or misnamed."""
    home = settings.home_path / "models"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("no folder for pulled models; only shipped ones are served", path=str(home), reason=error.strerror)
    owners: dict[str, Path] = {}
    repositories = tuple(path for path in settings.repositories if path != home or home.is_dir())
    for repository in repositories:
        try:
            names = sorted(
                item.name for item in repository.iterdir() if item.is_dir() and not item.name.startswith(".")
            )
        except OSError as error:
            raise CannotStart(
                f"the model repository {repository} cannot be read ({error.strerror}); "
                "give an existing folder with --model-repository"
            ) from error
        for name in names:
            if is_special(name):
                raise CannotStart(
                    f"Triton cannot start a model whose folder is named {name!r}, as the one in {repository}; "
                    "rename it, with no spaces and none of a shell's signs"
                )
            if name in owners:
                raise CannotStart(
                    f"the model {name!r} stands in {owners[name]} and in {repository}; remove one, names must be unique"
                )
            owners[name] = repository
    unknown = set(settings.models or ()) - set(owners)
    if unknown and not settings.engine_is_external:
        raise CannotStart(
            f"no model {min(unknown)!r} in {', '.join(map(str, repositories))}; "
            f"there are {', '.join(sorted(owners)) or 'none'}"
        )
    for name in sorted(set(settings.batching) - set(owners)):
        log.warning(
            "batching options of a model that is in no repository", model=name, known_models=", ".join(sorted(owners))
        )
    return repositories


def claim_run_dir() -> RunDirectory:
    """A private directory for this run, after removing leftovers of killed stacks. Raises CannotStart."""
    base = run_folders()
    try:
        run_dir, swept = claim_run_directory(base)
    except (OSError, RunDirectoryRefused) as error:
        raise CannotStart(f"no folder for this run under {base} ({error}); set TMPDIR to one that is yours") from error
    for found in swept:
        if found.killed or found.regions:
            log.warning(
                "cleared away what a killed stack left", processes=len(found.killed), regions=len(found.regions)
            )
    return run_dir
