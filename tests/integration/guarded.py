"""A stack with API keys, and what tests do with it."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from penstock.gateway.auth.api_keys import digest_of, new_secret
from tests.auth.signers import SHARED
from tests.integration.living import write_quick_models
from tests.support.http import Answer, post_json
from tests.support.stack import ENGINE_PORTS, RunningStack, start_stack

TOKENS = '\n[tokens]\naudience = "penstock"\nsecret_file = "secret"\n'
EVERY_KEY = ("camera", "flooder", "viewer")
INPUT = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [7]}]}
SLOW_INPUT = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [200]}]}


@dataclass
class Guarded:
    """A stack that asks for keys, with one for every purpose. file: its access file."""

    stack: RunningStack
    file: Path
    secrets: dict[str, str] = field(default_factory=dict)

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[name]}"} if name else {}

    def infer(self, name: str, model: str = "identity", **headers: str) -> Answer:
        """One inference over HTTP; every secret that is sent must not be disclosed."""
        payload = SLOW_INPUT if model == "slow" else INPUT
        return post_json(f"{self.stack.http_url}/v2/models/{model}/infer", payload, **(headers or self.headers(name)))

    def write(self, *names: str, more: str = "") -> None:
        """The access file with these keys, put in the old one's place."""
        write_keys(self.file, self.secrets, *names, more=more)

    def wait_for_status(self, name: str, status: int) -> None:
        """Until an inference with that key is answered so."""
        until = time.monotonic() + 20
        while self.infer(name).status != status:
            assert time.monotonic() < until, f"{name} is not answered {status}"
            time.sleep(0.1)


def write_keys(file: Path, secrets: dict[str, str], *names: str, more: str = "") -> None:
    """The access file with these keys, put in the old one's place."""
    roles = {"camera": '["infer"]', "flooder": '["infer"]', "viewer": '["read"]'}
    tables = [f'[keys.{name}]\nsha256 = "{digest_of(secrets[name])}"\nroles = {roles[name]}' for name in names]
    new = file.with_suffix(".new")
    new.write_text("\n".join(tables) + more)
    os.replace(new, file)


def start_guarded(home: Path) -> Guarded:
    """Eight places in flight, so that a test can fill them; everything that can be logged is.

    The engine's ports are set, which a stack with keys does not open.
    """
    write_quick_models(home / "models")
    secrets = {name: new_secret() for name in (*EVERY_KEY, "ops")}
    file = home / "access.toml"
    (home / "secret").write_text(SHARED)
    write_keys(file, secrets, *EVERY_KEY, more=TOKENS)
    stack = start_stack(
        home,
        *("--access-file", str(file), "--models", "identity,slow", "--log-level", "debug", *ENGINE_PORTS),
        environ={"PENSTOCK_API_KEYS": f"ops:infer+read+admin:{secrets['ops']}", "PENSTOCK_MAX_INFLIGHT_REQUESTS": "8"},
    )
    return Guarded(stack, file, secrets)
