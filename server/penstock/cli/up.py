"""`penstock up`: the whole stack in the foreground, until Ctrl-C."""

import asyncio
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from penstock.cli.gateway_client import API_KEY_VARIABLE
from penstock.cli.terminal import fail
from penstock.cli.up_flags import signature
from penstock.gateway.settings import SHIPPED_MODELS
from penstock.gateway.settings_sources import KEYS_VARIABLE, SettingsError, read_settings, settings_origins
from penstock.gateway.stack.card_choice import show_cards, with_cards
from penstock.gateway.stack.stack import Announcement, Stack
from penstock.gateway.stack.startup import (
    CannotStart,
    EngineChoice,
    check_access,
    choose_engine,
    choose_mps,
    resolve_ports,
)
from penstock.gateway.workers.interrupt_affinity import avoid_interrupted_cores
from penstock.logs import configure_logs
from penstock.models.catalogue import DEFAULT_DETECTOR
from penstock.process import remove_working_directory

OPEN_FILES = 65_536  # a request in flight holds one or two; the usual soft limit of 1,024 is under the default's need

MIN_OPEN_FILES = 512  # libraries, pipes and the engine's connections take about 200

EPILOG = """\
Every setting is also an environment variable, PENSTOCK_HTTP_PORT for --http-port. Flags override variables, and
variables override the file.

On loopback every client may do everything. To listen on other addresses, give API keys, or --anonymous with the roles
of clients without a key. `penstock keys new` creates a key in the file for --access-file. Without a file, give
api_keys (PENSTOCK_API_KEYS) as NAME:ROLE+ROLE:SECRET, comma-separated.

Batching options of a model: batch_owner, slo_p99_ms (deadline of requests without one), max_batch_size,
max_queue_delay_us, max_queue_size, max_queue_bytes. Set them as parameters in config.pbtxt, in the file as
[batching.MODEL], or as --batching street=gateway,slo_p99_ms=50; In PENSTOCK_BATCHING, separate models with ';'.

PENSTOCK_LAYOUTS, a variable only, allows output layouts of your own: module:function, comma-separated.

These settings have no flag: max_body_bytes [64 MiB], max_model_bytes [1 GiB, of a model file that is added over HTTP],
body_timeout_s [30], max_pixels [40000000], max_inflight_requests [1024], max_inflight_bytes [1 GiB], max_connections
[16384 to the REST port and 16384 to the gRPC port, each at most a quarter of the open files],
max_connections_per_address [4096, at most half of max_connections], grpc_max_connection_age_s [0: no limit; older
connections take no new calls, so that clients reconnect], head_timeout_s [10], write_timeout_s [30], decoders [one per
core], decode_timeout_s [5], slab_bytes [256 MiB of memory shared with the engine; 0: none], client_shm_lease_s [3600,
of an idle region], canary_interval_s [5], canary_failures [3], execution_timeout_s [30; a model that answers nothing
for this time hangs], gpu_metrics [auto: GPU activity by NVML; off; or a dcgm-exporter's http://host:9400/metrics].
"""


def up(**flags: Any) -> None:
    """Start the engine and the gateway and stay in the foreground; Ctrl-C drains and stops both.

    The engine is Triton where it can run, else ONNX Runtime embedded in the gateway, which serves ONNX models only;
    --engine triton, embedded, a URL or module:Class of your own says which.
    """
    config = flags.pop("config", None)
    try:
        code = _serve(flags, config)
    except (SettingsError, CannotStart) as error:
        fail(str(error))
    raise typer.Exit(code)


up.__signature__ = signature()  # type: ignore[attr-defined]  # typer reads the flags from it


def _serve(flags: dict[str, Any], config: Path | None) -> int:
    """The exit code. flags: as they were given. Raises SettingsError, CannotStart."""
    for name in ("models", "required_models", "anonymous", "trusted_proxy"):
        flags[name] = tuple(filter(None, flags[name].split(","))) if flags.get(name) is not None else None
    for name in ("batching", "model_repository", "allowed_host", "cors_origin", "allow_outbound", "load_target"):
        flags[name] = tuple(flags.get(name) or ()) or None
    settings, origins = read_settings(flags, file=config), settings_origins(flags, file=config)
    configure_logs(settings.log_format, settings.log_level)
    for secret in (KEYS_VARIABLE, API_KEY_VARIABLE):
        os.environ.pop(secret, None)  # no child needs it, and models can read theirs
    check_access(settings)
    allow_open_files()
    remove_working_directory()
    choice = with_cards(choose_engine(settings))
    show_cards(choice)
    choice = choose_mps(choice)
    settings = resolve_ports(choice.settings, len(choice.engine_plans))
    return asyncio.run(_run(replace(choice, settings=settings, origins=origins)))


def allow_open_files() -> None:
    """Raises the soft limit of open files to OPEN_FILES, or to the hard limit if that is lower. Never lowers it.

    Raises SettingsError if the hard limit is below MIN_OPEN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise SettingsError(
            f"the limit of open files is {hard}, at least {MIN_OPEN_FILES} are needed; raise it with ulimit -n, or "
            "docker run --ulimit nofile=65536"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(choice: EngineChoice) -> int:
    with avoid_interrupted_cores():
        return await Stack(choice, announce=announce).run()


def announce(ready: Announcement) -> None:
    """Print the summary: unavailable models with their reasons, the engine, the models that serve, the URLs.

    If only shipped models serve, it offers the default detector.
    """
    lines = [
        f"cannot serve {name}: {reason.removeprefix(f'model {name!r} cannot be loaded: ')}"
        for name, reason in sorted(ready.unavailable.items())
    ]
    lines.append(f"engine: {ready.engine}")
    nothing = "no model: see the reasons above" if ready.unavailable else "no model yet"
    lines.append(f"serving {', '.join(ready.models) or nothing}")
    if {*ready.models, *ready.unavailable} <= {path.name for path in SHIPPED_MODELS.iterdir()}:
        lines.append(f"for a detector of 80 classes: penstock models pull {DEFAULT_DETECTOR}")
    lines.append("Ctrl-C drains and stops")
    workers = f"  ({ready.workers} workers)" if ready.workers > 1 else ""
    if ready.not_ready:
        lines.append(f"health checks fail: {ready.not_ready}")
    if ready.console_url:
        lines.append(f"console: {ready.console_url}")
    state = "not ready" if ready.not_ready else "ready"
    lines.append(f"{state}: REST {ready.http_url}  gRPC {ready.grpc_address}  metrics {ready.metrics_url}{workers}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
