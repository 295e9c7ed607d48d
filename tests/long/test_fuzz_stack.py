"""Many more damaged calls than `make test` sends: the running stack answers or hangs up, and neither dies nor grows."""

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.integration.damaged_calls import damage_frames, damage_http, damage_messages
from tests.integration.test_bad_input import unharmed
from tests.long.hostile_pictures import private_bytes
from tests.support.damage import MIB, Run
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1800)]
MAX_GROWTH_BYTES = 64 * MIB  # of a process of the gateway
MAX_STACK_GROWTH_BYTES = 100 * MIB  # of all processes together, Triton's and its models' among them

Damage = Callable[[RunningStack, Run], Awaitable[Counter[str]]]
KINDS: dict[str, tuple[Damage, int, int]] = {
    "http": (damage_http, 2_000, 40_000),
    "grpc frames": (damage_frames, 2_000, 40_000),
    "grpc messages": (damage_messages, 5_000, 150_000),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_damaged_calls_leave_the_stack_as_it_was(stack: RunningStack, kind: str) -> None:
    """No server error, no traceback in an answer, no hang, no growth after a warm-up, no restarted engine."""
    damage, warm_up, cases = KINDS[kind]
    await damage(stack, Run(f"{kind}, warm-up", warm_up))
    before = sum(private_bytes(stack).values())
    with unharmed(stack, may_grow_bytes=MAX_GROWTH_BYTES):
        run = Run(kind, cases)
        outcomes = await damage(stack, run)
    grown = sum(private_bytes(stack).values()) - before
    print(f"{run}: {grown / MIB:+.0f} MiB, {dict(outcomes.most_common(12))}")  # noqa: T201
    assert len(outcomes) > 2
    assert grown < MAX_STACK_GROWTH_BYTES
    assert not stack.logged("request failed|failed unexpectedly|Traceback")
