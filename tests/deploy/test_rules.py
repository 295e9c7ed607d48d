"""Each rule parses, names what exists, has a unit test that it can fail, and each alert a paragraph in the runbook."""

import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.metric_tables import MONITORING, known_metrics, rules
from tests.deploy.promql import complaints, labels_of, parsed
from tests.support.stack import CHECKOUT

RULES, TESTS = MONITORING / "rules", MONITORING / "rule_tests"
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in rules() if "record" in rule}
RUNBOOKS = sorted(MONITORING.glob("RUNBOOK*.md"))
THRESHOLD = re.compile(r"(>=?) (?P<number>\d+(\.\d+)?)\b(?! \*? ?3600)")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What Debian's promtool says; skips where there is none."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: Debian's package prometheus has it")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@cache
def unit_tests() -> list[dict[str, Any]]:
    """Every test of every file."""
    files = sorted(TESTS.glob("*.yaml"))
    return [test for file in files for test in yaml.safe_load(file.read_text())["tests"]]


def anchors(page: Path) -> list[str]:
    """Where a link into the page may point, as its headings say."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_rules_pass_promtool() -> None:
    """Prometheus takes every file of rules."""
    done = promtool("check", "rules", *sorted(RULES.glob("*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted(TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_rules_do_what_their_unit_tests_say(file: Path) -> None:
    """Alerts fire with exactly these labels and words, stay silent on what is well, and records have these values."""
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted(TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_unit_tests_say_in_which_order_groups_are_evaluated(file: Path) -> None:
    """promtool's own order is any: an alert would see the records of the evaluation before, sometimes."""
    listed = yaml.safe_load(file.read_text())
    groups = [
        group["name"] for path in listed["rule_files"] for group in yaml.safe_load((TESTS / path).read_text())["groups"]
    ]
    assert listed["group_eval_order"] == groups


def test_alerts_each_fire_in_one_unit_test_and_are_silent_in_another() -> None:
    """Whatever an alert is for is shown, and so is what it is not for."""
    checks = [check for test in unit_tests() for check in test.get("alert_rule_test", ())]
    fires = {check["alertname"] for check in checks if check["exp_alerts"]}
    silent = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert fires == set(ALERTS)
    assert silent == set(ALERTS)


def test_records_each_have_their_value_in_a_unit_test() -> None:
    """A record is asked for by its name and answers with samples."""
    checks = [check for test in unit_tests() for check in test.get("promql_expr_test", ())]
    assert {check["expr"] for check in checks if check["exp_samples"]} == set(RECORDS)


def test_names_of_rules_are_said_once_and_one_way() -> None:
    """No alert or record twice; alerts begin with Penstock, records with penstock: and have three parts."""
    counted = Counter(rule.get("alert") or rule["record"] for rule in rules())
    assert [name for name, times in counted.items() if times > 1] == []
    assert [name for name in ALERTS if not re.fullmatch(r"Penstock([A-Z0-9][a-z0-9]*)+", name)] == []
    assert [name for name in RECORDS if not re.fullmatch(r"penstock:\w+:\w+", name)] == []


@pytest.mark.parametrize("name", [*RECORDS, *ALERTS])
def test_rule_names_only_metrics_and_labels_that_exist(name: str) -> None:
    """Every metric is in a table or recorded, and has each label that is matched, kept or joined on."""
    rule = RECORDS.get(name) or ALERTS[name]
    assert complaints(rule["expr"], known_metrics()) == []


@pytest.mark.parametrize("name", ALERTS)
def test_alert_says_how_urgent_it_is_where_and_what_to_read(name: str) -> None:
    """A time, a severity, two sentences that name labels that the alert has, and a paragraph of the runbook."""
    alert = ALERTS[name]
    assert re.fullmatch(r"\d+[mh]", alert["for"])
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    words = alert["annotations"]["summary"] + alert["annotations"]["description"]
    named = set(re.findall(r"\$labels\.(\w+)", words))
    assert named
    assert named <= labels_of(parsed(alert["expr"]), known_metrics()) | alert["labels"].keys()
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert anchors(CHECKOUT / page).count(anchor) == 1
    assert name.lower().startswith(anchor)


def test_paragraphs_of_the_runbook_each_have_their_alert() -> None:
    """No paragraph outlives its alert."""
    read = {alert["annotations"]["runbook"] for alert in ALERTS.values()}
    written = {
        f"{page.relative_to(CHECKOUT)}#{anchor}"
        for page in RUNBOOKS
        for anchor in anchors(page)
        if anchor.startswith("penstock")
    }
    assert written == read


def spoilt(rule: dict[str, Any]) -> dict[str, Any]:
    """The alert with half its thresholds; one that has none fires at once."""
    if "alert" not in rule:
        return rule
    expr = THRESHOLD.sub(lambda found: f"{found[1]} {float(found['number']) / 2}", rule["expr"])
    return {**rule, "expr": expr} if expr != rule["expr"] and "> 0.0" not in expr else {**rule, "for": "0s"}


@pytest.mark.long
@pytest.mark.parametrize("file", sorted(RULES.glob("*.yaml")), ids=lambda file: file.stem)
def test_unit_tests_notice_each_alert_that_is_spoilt(file: Path, tmp_path: Path) -> None:
    """With a threshold of half its size, or without its time, every alert of the file makes a unit test fail."""
    groups = yaml.safe_load(file.read_text())["groups"]
    (tmp_path / "rules").mkdir()
    (tmp_path / "rule_tests").mkdir()
    mutant = {"groups": [{**group, "rules": [spoilt(rule) for rule in group["rules"]]} for group in groups]}
    (tmp_path / "rules" / file.name).write_text(yaml.safe_dump(mutant))
    tests = [path for path in TESTS.glob("*.yaml") if f"/{file.name}" in path.read_text()]
    done = promtool("test", "rules", *(shutil.copy(path, tmp_path / "rule_tests") for path in tests))
    failed = set(re.findall(r"alertname: (\w+),", done.stdout + done.stderr))
    assert failed == {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
