"""SETTINGS.md, which users read, against what is read."""

import re
from pathlib import Path

import pytest

from penstock_video.analytics.config import rules_from
from penstock_video.errors import RuleRefused
from penstock_video.sinks.registry import SINKS
from penstock_video.types import AnalyticsKind
from tests.deepstream_pipeline.settings.reading import faults
from tests.support.stack import CHECKOUT

PAGE = (CHECKOUT / "deepstream_pipeline" / "penstock_video" / "settings" / "SETTINGS.md").read_text()
SECTIONS = ("source", "streammux", "primary-gie", "secondary-gie", "tracker", "osd", "engine", "api", "events", "gpu")
NO_KEY = "zzzzzzzz"


def keys_of(section: str, folder: Path) -> list[str]:
    """What a section of the file takes, as its complaint of another key tells it."""
    listed = [text for text in faults(section, folder) if NO_KEY in text]
    assert len(listed) == 1, listed
    return re.sub(r".*there are ", "", listed[0]).split(", ")


@pytest.mark.parametrize("name", SECTIONS)
def test_page_has_every_key_of_a_section(name: str, tmp_path: Path) -> None:
    """Each key is on the page, since an undocumented key is unused."""
    keys = keys_of(f"{name}: {{{NO_KEY}: 1}}", tmp_path)
    assert len(keys) > 2
    missing = [key for key in keys if f"`{key}`" not in PAGE and f"`{name}.{key}`" not in PAGE]
    assert not missing


@pytest.mark.parametrize("kind", SINKS)
def test_page_has_every_key_of_a_sink(kind: str, tmp_path: Path) -> None:
    """In the sink's own row, or in the line about all brokers."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |"))
    shared = next(line for line in PAGE.splitlines() if line.startswith("The last four also"))
    known = row + shared if kind in ("kafka", "mqtt", "redis", "webhook") else row
    keys = keys_of(f"sink: {{type: {kind}, {NO_KEY}: 1}}", tmp_path)
    assert [key for key in keys if key != "type" and f"`{key}`" not in known] == []


@pytest.mark.parametrize("kind", AnalyticsKind)
def test_page_has_every_key_of_a_rule(kind: AnalyticsKind) -> None:
    """In the row of its list."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |"))
    with pytest.raises(RuleRefused) as refused:
        rules_from({kind.value: [{NO_KEY: 1}]}, ())
    keys = refused.value.message.partition("keys: ")[2].split(", ")
    assert len(keys) > 2
    assert [key for key in keys if key not in ("name", "class-id") and f"`{key}`" not in row] == []
