"""Which engine `penstock plan` replays: one of a profile, or the one that a running model's calls were fitted to."""

from dataclasses import dataclass

from server.commands.gateway import Gateway, GatewayError
from server.commands.terminal import fail
from server.planning.engine import EngineModel
from server.planning.profile import line
from server.planning.profile_file import ProfileError, find_profile


@dataclass(frozen=True, slots=True)
class Replayed:
    """The engine, and the SLOs in ms that are meant where none is said."""

    engine: EngineModel
    slos_ms: tuple[float, ...] = ()


def engine_of_profile(name: str, *, instances: int | None, way_ms: float) -> Replayed:
    """Of a built-in or measured profile, with one instance where nothing is said. Ends the command where it is none."""
    try:
        profile = find_profile(name)
    except ProfileError as error:
        fail(str(error))
    return Replayed(EngineModel(profile, instances or 1, before_s=way_ms / 1e3, after_s=way_ms / 1e3))


def engine_of_model(name: str, gateway: Gateway, *, instances: int | None, way_ms: float) -> Replayed:
    """As a running gateway knows the model's calls by now. Ends the command where it does not."""
    try:
        page = gateway.explain_model(name)
    except GatewayError as error:
        fail(str(error), code=1)
    fit, options = page.fit, page.options
    if fit is None:
        fail(f"{gateway.url} does not know yet how long {name} takes: send it requests of several sizes first", code=1)
    if fit.alpha_ms + fit.beta_ms_per_row <= 0:
        fail(f"{name} takes no time by what {gateway.url} measured: there is nothing to plan", code=1)
    profile = line(
        name,
        alpha_s=fit.alpha_ms / 1e3,
        beta_s=fit.beta_ms_per_row / 1e3,
        max_batch_size=max(options.max_batch_size, 1),
    )
    engine = EngineModel(profile, instances or options.instances, before_s=way_ms / 1e3, after_s=way_ms / 1e3)
    return Replayed(engine, (options.slo_p99_ms,) if options.slo_p99_ms else ())
