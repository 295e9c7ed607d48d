"""`penstock models check` with a gateway's address."""

import json

import pytest

from tests.cli.conftest import Call, StandIn
from tests.cli.test_model_check import only_ours, save

__all__ = ["only_ours"]  # a fixture: no shipped models, and no gateway at the default address

UNUSED_URL = "http://127.0.0.1:1"
KEY_WANTED = "(a check wants a key with the roles infer and read)"
NO_KEY = (401, '{"error": "this needs an API key"}', {})
NO_ROLE = (403, '{"error": "\'ci\' lacks the role read, which this needs (it has: admin); use another key"}', {})


def test_check_of_a_named_address_without_a_gateway_is_a_failure(penstock: Call) -> None:
    """One sentence and no table: the file on this machine says nothing of that gateway."""
    save()
    answer = penstock("models", "check", "m", "--url", UNUSED_URL)
    assert (answer.exit_code, answer.stdout, answer.stderr.count("\n")) == (1, "", 1)
    assert answer.stderr.startswith(f"penstock: no model was checked, since nothing answers at {UNUSED_URL}: ")


@pytest.mark.parametrize(
    ("refusal", "why"), [(NO_KEY, "requires an API key: give a valid key"), (NO_ROLE, "'ci' lacks the role read")]
)
def test_check_of_a_gateway_that_denies_access_is_a_failure(
    penstock: Call, stand_in: StandIn, refusal: tuple[int, str, dict[str, str]], why: str
) -> None:
    """Without a key, or without the role; the sentence says which roles a check wants."""
    save()
    stand_in.refusals["/index"] = refusal
    answer = penstock("models", "check", "m", "--url", stand_in.url)
    assert (answer.exit_code, answer.stdout, answer.stderr.count("\n")) == (1, "", 1)
    assert why in answer.stderr
    assert answer.stderr.endswith(f"{KEY_WANTED}\n")


def test_check_of_a_model_that_a_named_gateway_has_not_loaded_is_a_failure(penstock: Call, stand_in: StandIn) -> None:
    """The exit code is 1 if the command names the model; a check of all models reports it as not judged."""
    save()
    for words, code, verdict in ((("m",), 1, "cannot run"), ((), 0, "not judged")):
        answer = penstock("models", "check", *words, "--json", "--url", stand_in.url)
        (row,) = json.loads(answer.stdout)
        assert (answer.exit_code, row["verdict"], row["ran"]) == (code, verdict, "")
        assert row["reasons"][0].startswith(f"it is not loaded at {stand_in.url}: load it there")


@pytest.mark.parametrize("refusal", [None, NO_KEY])
def test_check_without_an_address_runs_here_and_says_so(
    penstock: Call, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str, dict[str, str]] | None
) -> None:
    """Without a gateway at the default address, or with one that requires a key, the check runs in this process."""
    save()
    if refusal is not None:
        stand_in.refusals["/index"] = refusal
        monkeypatch.setenv("PENSTOCK_HTTP_PORT", stand_in.url.rpartition(":")[2])
    answer = penstock("models", "check", "m")
    assert answer.exit_code == 0
    assert "in-process" in answer.stdout
    assert answer.stderr.startswith("penstock: models are checked in this process, since ")
    assert (KEY_WANTED in answer.stderr) == (refusal is not None)
