"""Scenarios as files: the shipped ones are sound, and a mistake in one's own is named."""

import re
import textwrap
from pathlib import Path

import pytest

from penstock_load.scenario import FOLDER, ScenarioError, Shape, read_scenario, scenario_names
from penstock_load.targets import read_targets

GOOD = """
name = "mine"
about = "one rate"
[[request]]
kind = "image"
model = "street"
[[phase]]
name = "steady"
seconds = 5
is_judged = true
arrivals = { shape = "constant", rate = 10 }
"""


def test_shipped_scenarios_are_those_that_were_promised() -> None:
    """Ten scenarios ship; each can be read, is named after its file, and judges something."""
    promised = "cold-start grpc-stream image-burst image-steady mixed-models overload soak tensor-large tensor-small"
    promised += " video-streams"
    assert scenario_names() == tuple(promised.split())
    for name in scenario_names():
        scenario = read_scenario(name)
        assert scenario.name == name
        assert any(phase.is_judged for phase in scenario.phases)


def test_scenario_of_ones_own_is_read_by_its_path(tmp_path: Path) -> None:
    """A file anywhere is as good as a shipped one."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    scenario = read_scenario(str(path))
    assert (scenario.name, scenario.requests[0].label, scenario.phases[0].seconds) == ("mine", "image street", 5)


def test_scenario_and_target_in_the_readme_are_sound(tmp_path: Path) -> None:
    """The examples there are accepted, and have every shape."""
    text = (FOLDER.parents[1] / "README.md").read_text()
    examples = [textwrap.dedent(block) for block in re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE)]
    mine, rows = tmp_path / "lunch.toml", tmp_path / "rows.toml"
    mine.write_text(next(block for block in examples if "[[phase]]" in block))
    rows.write_text(next(block for block in examples if "[[target]]" in block))
    assert read_targets(rows, also=(read_scenario(str(mine)).name,))[0].id == "lunch-p90"
    assert all(f"`{shape}`" in text for shape in Shape)


MISTAKES = {
    ", rate": (", raet", "did you mean rate"),
    '"constant"': ('"constnat"', "did you mean constant"),
    '"constant", rate': ('"linear", rate', "there are constant, poisson, ramp, step, burst, replay"),
    '"constant", ': ('"constant", unit = "rps", ', "there are per_s, of_capacity"),
    "[[phase]]": ("[phase]", "write [[phase]]"),
    "kind = ": ("kimd = ", "did you mean kind"),
    'kind = "image"': ('kind = "grcp"', "did you mean grpc"),
    "seconds = 5": ("seconds = 0", "no length"),
    "rate = 10 }": ("rate = -1 }", "rate = -1"),
    "is_judged = true": ("is_judged = false", "nothing to judge"),
    'shape = "constant", rate = 10': ('shape = "step", rate = 10', "step takes rates, not rate"),
    'shape = "constant"': ('shape = "burst"', "needs burst_s"),
    "rate = 10": ('unit = "of_capacity", rate = 0.5', "is_capacity"),
    "arrivals = ": ("callers = 3\narrivals = ", "either arrivals, or callers"),
    'model = "street"': ('model = "street"\nshare = 0', "share is above 0"),
    'name = "mine"': ('name = "mine', "mine.toml"),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "sentence"), [(right, *rest) for right, rest in MISTAKES.items()])
def test_scenario_with_a_mistake_is_refused_with_the_place(
    tmp_path: Path, right: str, wrong: str, sentence: str
) -> None:
    """One sentence names the file, and where it can, the word that was meant."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(right, wrong))
    with pytest.raises(ScenarioError) as refusal:
        read_scenario(str(path))
    assert sentence in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_scenario_that_is_not_there_is_refused_with_the_nearest_name() -> None:
    """A misspelt name gets the right one, a strange one the list."""
    with pytest.raises(ScenarioError, match="did you mean image-steady"):
        read_scenario("image-stedy")
    with pytest.raises(ScenarioError, match="tensor-large"):
        read_scenario("xyz")
    with pytest.raises(ScenarioError, match=r"cannot be read"):
        read_scenario(str(FOLDER / "absent.toml"))
