"""Restarts a model that hangs or fails: in its engine, or in an engine process of its own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from penstock.engines.dedicated_engines import DedicatedEngines
from penstock.engines.triton.client import DiskLoads, SupervisedTriton, TritonEngine
from penstock.engines.triton.endpoints import TritonListeners
from penstock.gateway.composition import ConnectedEngine
from penstock.gateway.settings import Settings
from penstock.gateway.workers.core_relay import GRPC_SOCKET, HTTP_SOCKET
from penstock.gateway.workers.gateway_process import ControlConnection, RestartModel
from penstock.gateway.workers.running_stacks import reachable_folder


def core_backend(settings: Settings, run_dir: Path) -> TritonEngine:
    """A client of the core in this run directory, which has the same API as an engine."""
    return TritonEngine(
        http_url=f"unix://{run_dir / HTTP_SOCKET}",
        grpc_address=f"unix:{run_dir / GRPC_SOCKET}",
        max_connections=settings.max_inflight_requests,
        finishes=False,
    )


def with_own_engines(
    settings: Settings, main: ConnectedEngine, control: ControlConnection | None
) -> tuple[ConnectedEngine, DedicatedEngines | None]:
    """The engine for the gateway, and its part with dedicated engines for models that hung.

    That part is None with a Triton given by URL, with a user's engine, with MPS, with several cards, and with clients'
    shared memory.
    """
    if control is None or not settings.engine_has_files or settings.mps == "on" or settings.allow_client_shm:
        return main, None
    if main.cards.engines:
        return main, None

    cached_path = cache(reachable_folder)

    def connect(folder: str) -> TritonEngine:
        run_dir = cached_path(Path(folder))
        if settings.engine_is_embedded:
            return core_backend(settings, run_dir)
        listeners = TritonListeners(run_dir)
        return SupervisedTriton(
            http_url=listeners.http_url,
            grpc_address=listeners.grpc_address,
            max_connections=settings.max_inflight_requests,
            disk=DiskLoads(settings.repositories, run_dir / "labels"),
        )

    own = DedicatedEngines(
        main.engine,
        connect=connect,
        give_up=getattr(main.engine, "give_up", main.engine.unload),
        start=lambda model, reason: control.send(RestartModel(model, reason, has_own_engine=True)),
    )
    return replace(main, engine=own), own


def model_restarter(
    settings: Settings,
    main: ConnectedEngine,
    own: DedicatedEngines | None,
    control: ControlConnection | None,
    generations: Callable[[], Mapping[str, int]],
) -> Callable[[str, str, int], None] | None:
    """Function to restart a model, by name, reason, number of hangs; None for a user's engine or a Triton by URL."""
    in_place: Callable[[str, str], None]
    if settings.engine_class:
        return None
    if settings.engine_is_embedded:
        from penstock.engines.embedded.engine import EmbeddedEngine  # here because it loads ONNX Runtime

        assert isinstance(main.engine, EmbeddedEngine)
        in_place = main.engine.renew
    elif control is None or settings.engine_is_external:
        return None
    else:
        line = control
        in_place = lambda model, reason: line.send(  # noqa: E731
            RestartModel(model, reason, generations().get(model, 0))
        )

    def restart(model: str, reason: str, hangs: int) -> None:
        if own is None or not own.restart(model, reason, hangs=hangs):
            in_place(model, reason)

    return restart
