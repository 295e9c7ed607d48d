"""A row with the runbook's words on the alerts that a dashboard is about: what each means, and what to do."""

import re
from pathlib import Path

import yaml

from deploy.monitoring.build.board import Look, Panel, Row

FOLDER = Path(__file__).resolve().parents[1]


def runbook(*rule_files: str) -> Row:
    """Of the alerts in these files of rules, in their order."""
    sections = _sections()
    anchors = [anchor for name in rule_files for anchor in _anchors(FOLDER / "rules" / f"{name}.yaml")]
    text = "\n\n".join(sections[anchor] for anchor in dict.fromkeys(anchors))
    panel = Panel(
        "What each alert means, and what to do",
        "From the runbook (deploy/monitoring/RUNBOOK.md and RUNBOOK-video-gpu.md), as it was when the dashboard was "
        "made.",
        "none",
        look=Look.TEXT,
        width=24,
        height=30,
        text=text + "\n",
    )
    return Row("Runbook", (panel,), is_collapsed=True)


def _anchors(rules: Path) -> list[str]:
    """Where each alert's runbook is, after the file's name."""
    groups = yaml.safe_load(rules.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    return [str(alert["annotations"]["runbook"]).partition("#")[2] for alert in alerts]


def _sections() -> dict[str, str]:
    """Each alert's, by its anchor. Links among them lead nowhere in Grafana, so their words stay alone."""
    found = {}
    for path in sorted(FOLDER.glob("RUNBOOK*.md")):
        for section in path.read_text().split("\n## ")[1:]:
            words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", section.strip())
            found[section.partition("\n")[0].lower()] = f"## {words}"
    return found
