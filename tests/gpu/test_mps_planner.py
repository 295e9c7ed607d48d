"""What each model gets of a GPU that is shared under MPS."""

import pytest

from penstock.gpu.mps.limits import ModelClients
from penstock.gpu.mps.planner import ModelPlan, plan_models


def clients(count: int, name: str = "client") -> list[ModelClients]:
    """So many models of one process, for single rows."""
    return [ModelClients(f"{name}-{number:02d}", 1, is_checked=True) for number in range(count)]


def threads(plans: tuple[ModelPlan, ...]) -> set[float]:
    return {plan.threads for plan in plans}


@pytest.mark.parametrize(("count", "percent"), [(1, 0.0), (3, 0.0), (4, 25.0), (8, 25.0), (9, 12.0), (47, 12.0)])
def test_many_processes_with_single_rows_are_limited_and_few_are_not(count: int, percent: float) -> None:
    """With one process a model, or all of them in one model."""
    assert threads(plan_models(clients(count), 1, limit=None)) == {percent}
    assert threads(plan_models([ModelClients("one", count, is_checked=True)], 1, limit=None)) == {percent}


def test_merged_batches_have_all_threads_beside_limited_clients() -> None:
    """A batch fills the GPU; of a model with eight processes four are enough."""
    shared = ModelClients("shared", 8, max_rows=64, is_merged=True, is_checked=True)
    *limited, plan = plan_models([*clients(9), shared], 1, limit=None)
    assert threads(tuple(limited)) == {12.0}
    assert plan.threads == 0.0
    assert plan.line == (
        "shared: 8 processes, all threads: batches of up to 64 fill the GPU; 4 are enough (set count in instance_group)"
    )
    assert limited[0].line == (
        "client-00: 1 process, 12 % of the threads each: 9 processes with single rows share the GPU"
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ModelClients("m", 8, max_rows=16, is_checked=True), "a request may have 16 rows"),
        (ModelClients("m", 8), "only backend torch checks its answers with a limit"),
    ],
)
def test_requests_of_many_rows_and_unchecked_backends_have_all_threads(row: ModelClients, reason: str) -> None:
    """A wrong number of SMs gives wrong answers, which only our backend notices."""
    (plan,) = plan_models([row], 1, limit=None)
    assert (plan.threads, plan.reason) == (0.0, reason)


def test_models_on_other_gpus_do_not_count() -> None:
    """A group that names its cards is on these; the fullest card of a model decides."""
    models = [
        ModelClients("a", 9, (0,), is_checked=True),
        ModelClients("b", 3, (1,), is_checked=True),
        ModelClients("c", 1, is_checked=True),
    ]
    assert [plan.threads for plan in plan_models(models, 2, limit=None)] == [12.0, 25.0, 12.0]


def test_limit_of_the_settings_is_every_models_and_the_models_own_comes_first() -> None:
    """A number is isolation that someone wants; 0 is none."""
    models = [*clients(8), ModelClients("own", 1, is_checked=True, threads=50)]
    for limit in (25.0, 0.0):
        *others, own = plan_models(models, 1, limit=limit)
        assert threads(tuple(others)) == {limit}
        assert (own.threads, own.reason) == (50, "set in config.pbtxt")
