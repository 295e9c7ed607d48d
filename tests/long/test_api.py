"""More of what schemathesis asks by the API's description than `make test` has time for, from a new seed each time."""

import random
import re
from pathlib import Path

import pytest

from tests.integration.test_openapi import ask_everything, assert_unharmed
from tests.integration.test_openapi import own_stack as own_stack
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
EXAMPLES = 150


def test_schemathesis_finds_no_server_error_in_many_cases(own_stack: RunningStack, tmp_path: Path) -> None:
    """As in `make test`, some thousands of cases; the seed is printed."""
    seed = random.SystemRandom().randrange(1 << 31)
    found = ask_everything(own_stack, tmp_path, examples=EXAMPLES, seed=seed)
    assert found.returncode == 0, f"seed {seed}\n" + found.stdout[-8000:] + found.stderr[-2000:]
    print(f"schemathesis: {re.findall(r'[0-9]+ generated', found.stdout)}, seed {seed}")  # noqa: T201
    assert_unharmed(own_stack)
