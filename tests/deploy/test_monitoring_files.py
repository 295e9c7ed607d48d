"""compose.monitoring.yaml and what it mounts: files that exist, at the paths that the programs are given."""

import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.metric_tables import MONITORING, external_rows
from tests.deploy.test_compose import document, filled, merged

CHECKOUT = MONITORING.parents[1]
COMPOSE = CHECKOUT / "compose.monitoring.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
EACH_SERVICE = pytest.mark.parametrize("name", SERVICES)
STACKS = {"cpu": ["compose.yaml"], "gpu": ["compose.yaml", "compose.gpu.yaml"]}


def mounts(name: str) -> dict[str, tuple[str, str]]:
    """Of a service, by the path inside: what is mounted there, and how."""
    triples = (volume.split(":") for volume in SERVICES[name]["volumes"])
    return {inside: (source, "".join(mode)) for source, inside, *mode in triples}


def loaded(path: str) -> Any:
    """A YAML file of deploy/monitoring."""
    return yaml.safe_load((MONITORING / path).read_text())


@EACH_SERVICE
def test_mounts_are_there_and_read_only(name: str) -> None:
    """Every file or folder that a service is given exists, and cannot be written by it; the rest are named volumes."""
    volumes = yaml.safe_load(COMPOSE.read_text())["volumes"]
    for source, mode in mounts(name).values():
        if source.startswith("./"):
            assert (CHECKOUT / source).exists(), source
            assert mode == "ro", source
        else:
            assert source in volumes


@EACH_SERVICE
def test_services_are_pinned_confined_bounded_and_probed(name: str) -> None:
    """A version, no capability but what is said, no new privileges, limits, a probe, ports on loopback only."""
    service = SERVICES[name]
    assert re.fullmatch(r"\$\{\w+_IMAGE:-[\w./-]+:v?\d+\.\d+[\w.-]*\}", service["image"])
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert (service.get("cap_add", []), service.get("read_only", False)) == (
        (["SYS_ADMIN"], False) if name == "dcgm-exporter" else ([], True)
    )
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def stack(below: str) -> dict[str, Any]:
    """The files of that stack with compose.monitoring.yaml over them, as Compose puts them together."""
    whole: dict[str, Any] = {}
    for name in [*STACKS[below], COMPOSE.name]:
        whole = merged(whole, document(name))
    return whole


def named(service: dict[str, Any], kind: str) -> set[str]:
    """The networks, volumes, configs or secrets that a service takes by a name; paths are none."""
    entries = service.get(kind, [])
    names = (entry if isinstance(entry, str) else entry.get("source", "") for entry in entries)
    sources = {filled(name).split(":")[0] for name in names}
    return {source for source in sources if source and not source.startswith((".", "/", "~"))}


@pytest.mark.parametrize("below", STACKS)
def test_services_beside_the_stack_publish_ports_of_their_own(below: str) -> None:
    """No two of all the files want one port of the host."""
    ports = [
        filled(port).rsplit(":", 2)[1]
        for service in stack(below)["services"].values()
        for port in service.get("ports", [])
    ]
    assert len(ports) >= 6
    assert [port for port, times in Counter(ports).items() if times > 1] == []


@pytest.mark.parametrize("below", STACKS)
def test_services_beside_the_stack_name_what_is_there(below: str) -> None:
    """Whom a service waits for is a service, and each network, volume, config and secret is declared."""
    whole = stack(below)
    for name, service in whole["services"].items():
        assert set(service.get("depends_on", ())) <= set(whole["services"]), name
        assert named(service, "networks") <= {"default", *whole.get("networks", ())}, name
        for kind in ("volumes", "configs", "secrets"):
            assert named(service, kind) <= set(whole.get(kind, ())), (name, kind)
    assert {"home", "prometheus", "grafana"} <= set().union(
        *(named(one, "volumes") for one in whole["services"].values())
    )


@pytest.mark.parametrize("below", STACKS)
def test_services_of_monitoring_change_none_of_the_stack(below: str) -> None:
    """A name is taken once: the file adds services and volumes, and leaves those below it as they are."""
    for name in STACKS[below]:
        for kind in ("services", "volumes"):
            assert not set(document(name).get(kind) or ()) & set(document(COMPOSE.name)[kind]), (name, kind)


def test_prometheus_takes_the_config(tmp_path: Path) -> None:
    """promtool reads it from a folder that is laid out as in the container, and finds every file of rules."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: Debian's package prometheus has it")
    folder = tmp_path / "etc" / "prometheus"
    folder.mkdir(parents=True)
    for inside, (source, _) in mounts("prometheus").items():
        if source.startswith("./"):
            target = folder / Path(inside).relative_to("/etc/prometheus")
            copy = shutil.copytree if (CHECKOUT / source).is_dir() else shutil.copy
            copy(CHECKOUT / source, target)
    for scrape in loaded("prometheus.yml")["scrape_configs"]:
        if key := scrape.get("authorization", {}).get("credentials_file"):
            (folder / key).parent.mkdir()
            (folder / key).touch()
    done = subprocess.run([promtool, "check", "config", folder / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(list((MONITORING / 'rules').glob('*.yaml')))} rule files found" in done.stdout
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]


def test_prometheus_asks_services_that_there_are_on_their_ports() -> None:
    """Every target is a service of a Compose file; the stack is asked on the ports of its metrics."""
    services = SERVICES | yaml.safe_load((CHECKOUT / "compose.yaml").read_text())["services"]
    targets: set[str] = set()
    for scrape in loaded("prometheus.yml")["scrape_configs"]:
        for static in scrape.get("static_configs", []):
            targets |= set(static["targets"])
        for found in scrape.get("dns_sd_configs", []):
            targets |= {f"{name}:{found['port']}" for name in found["names"]}
    assert {"penstock:8002", "video:8010"} <= targets
    assert {target.split(":")[0] for target in targets} <= {*services, "localhost"}


def test_sed_of_the_readme_gives_each_alert_an_address(tmp_path: Path) -> None:
    """Beside `runbook` each alert has a `runbook_url`, which ends as it does; nothing else changes."""
    (command,) = re.findall(r"^    (sed .+) deploy/monitoring/rules/", (MONITORING / "README.md").read_text(), re.M)
    for file in (MONITORING / "rules").glob("*.yaml"):
        copy = Path(shutil.copy(file, tmp_path))
        subprocess.run([*shlex.split(command), copy], check=True)
        before, after = yaml.safe_load(file.read_text()), yaml.safe_load(copy.read_text())
        for rule in (rule for group in before["groups"] for rule in group["rules"] if "alert" in rule):
            address = f"https://git.example.com/penstock/blob/main/{rule['annotations']['runbook']}"
            rule["annotations"]["runbook_url"] = address
        assert after == before


def test_prometheus_gets_the_key_of_the_video_program(tmp_path: Path) -> None:
    """Its start writes the variable to the file that the scrape names, for itself only, and hands on its arguments."""
    service = SERVICES["prometheus"]
    (job,) = (one for one in loaded("prometheus.yml")["scrape_configs"] if one["job_name"] == "penstock-video")
    inside = f"/etc/prometheus/{job['authorization']['credentials_file']}"
    assert service["tmpfs"][0].startswith(f"{Path(inside).parent}:")
    (tmp_path / "prometheus").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "prometheus").chmod(0o755)
    command = [part.replace("$$", "$").replace(inside, str(tmp_path / "key")) for part in service["entrypoint"]]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PENSTOCK_VIDEO_API_KEY": "a $key 'of' 20 signs"}
    done = subprocess.run([*command, "--one", "two three"], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("--one|two three|", "")
    assert (tmp_path / "key").read_text() == environment["PENSTOCK_VIDEO_API_KEY"]
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_grafana_finds_its_data_source_and_dashboards() -> None:
    """The provider looks where the dashboards are mounted; the source is the service prometheus, at its interval."""
    (provider,) = loaded("grafana/provisioning/dashboards/penstock.yaml")["providers"]
    assert mounts("grafana")[provider["options"]["path"]][0] == "./deploy/monitoring/dashboards"
    assert not provider["allowUiUpdates"]
    (source,) = loaded("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert source["jsonData"]["timeInterval"] == loaded("prometheus.yml")["global"]["scrape_interval"]
    assert mounts("grafana")["/etc/grafana/provisioning"][0] == "./deploy/monitoring/grafana/provisioning"


def test_grafana_has_no_password_of_ours() -> None:
    """Without GRAFANA_ADMIN_PASSWORD nothing starts; who has none looks, and changes nothing."""
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_ADMIN_PASSWORD:?")
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_dcgm_exporter_gets_our_counters() -> None:
    """Its option names the mounted file, which lists what the dashboards use."""
    option = SERVICES["dcgm-exporter"]["command"][-1]
    assert mounts("dcgm-exporter")[option][0] == "./deploy/monitoring/dcgm-counters.csv"
    counters = (MONITORING / "dcgm-counters.csv").read_text()
    assert all(f"{row['name']}, " in counters for row in external_rows() if row["exporter"] == "dcgm")
