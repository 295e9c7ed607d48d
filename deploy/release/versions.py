"""The version wherever it stands: `python -m deploy.release.versions --tag v0.1.0` fails where two places disagree."""

import argparse
import re
import sys
import tomllib
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]


def project_version(checkout: Path = CHECKOUT) -> str:
    """The version of pyproject.toml, which the others must equal."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def versions(checkout: Path = CHECKOUT) -> list[tuple[str, str]]:
    """(place, version) of every place that states one."""
    chart = yaml.safe_load((checkout / "deploy/helm/penstock/Chart.yaml").read_text(encoding="utf-8"))
    found = [
        ("pyproject.toml, version", project_version(checkout)),
        ("server/penstock/__init__.py, VERSION", _version_of_the_program(checkout)),
        ("Chart.yaml, version", str(chart["version"])),
        ("Chart.yaml, appVersion", str(chart["appVersion"])),
    ]
    dockerfile = (checkout / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
    found += [
        ("Dockerfile, ARG VERSION", version) for version in set(re.findall(r"^ARG VERSION=(\S+)", dockerfile, re.M))
    ]
    for path in sorted(checkout.glob("compose*.yaml")):
        services = yaml.safe_load(path.read_text(encoding="utf-8")).get("services") or {}
        tags = {tag for service in services.values() if (tag := _tag(service.get("image", "")))}
        found += [(f"{path.name}, image tag", tag) for tag in sorted(tags)]
    return found


def _version_of_the_program(checkout: Path) -> str:
    """What `penstock --version` and the server's metadata say; empty where none is found."""
    text = (checkout / "server/penstock/__init__.py").read_text(encoding="utf-8")
    stated = re.search(r'^VERSION = "(.*?)"', text, re.M)
    return stated[1] if stated else ""


def _tag(image: str) -> str | None:
    """The version in the tag of one of our images; None for tags without one (`latest`) and for other images."""
    named = re.fullmatch(r"(?:.*/)?penstock(?:-[a-z]+)?:(?:\$\{\w+:-)?(\d+\.\d+\.\d+).*", image)
    return named[1] if named else None


def disagreements(wanted: str, checkout: Path = CHECKOUT) -> list[str]:
    """A sentence for each place that says another version."""
    return [f"{place} is {version}, not {wanted}" for place, version in versions(checkout) if version != wanted]


def main() -> None:
    """Says the one version; exit code 1 and a line for each place that disagrees with the tag, or pyproject.toml."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="such as v0.1.0; without it, the places are held against pyproject.toml")
    chosen = parser.parse_args()
    if chosen.tag is not None and not re.fullmatch(r"v\d+\.\d+\.\d+", chosen.tag):
        parser.error(f"--tag is {chosen.tag!r}; a release's tag looks like v{project_version()}")
    wanted = chosen.tag.removeprefix("v") if chosen.tag else project_version()
    if found := disagreements(wanted):
        raise SystemExit("\n".join([*found, "set them all to one version, commit, and tag that commit"]))
    sys.stdout.write(f"all {wanted}\n")


if __name__ == "__main__":
    main()
