"""MkDocs hook: publishes pages of the repository beside docs/, and generates the reference tables.

A page that is not in docs/ stays where it is and is shown under the name in PUBLISHED. Links between pages work on
GitHub and on the site: a link to a published file becomes a link to its page, a link to any other file of the
repository becomes the file's path.
"""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from docs.rest_reference import gateway_api, video_api
from penstock.cli.main import build_app, commands
from penstock.metric_table import METRICS
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.parameters import PARAMETERS
from penstock_video.metrics import TABLE

CHECKOUT = Path(__file__).resolve().parent.parent
PUBLISHED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "server/penstock/gateway/batching/README.md": "batching-options.md",
    "server/penstock/gpu/mps/README.md": "mps.md",
    "deepstream_pipeline/penstock_video/settings/SETTINGS.md": "video-settings.md",
    "deepstream_pipeline/penstock_video/sinks/SCHEMAS.md": "video-results.md",
    "server/README.md": "gateway-program.md",
    "deepstream_pipeline/README.md": "video-program.md",
    "loadtest/README.md": "load-tests.md",
    "loadtest/results/README.md": "results.md",
    "loadtest/results/gpu-h200/report.md": "results-gpu.md",
    "loadtest/results/gpu-h200/gpu-video.md": "results-gpu-video.md",
    "deploy/models/README.md": "model-tools.md",
    "deploy/docker/README.md": "containers.md",
    "deploy/helm/penstock/README.md": "helm.md",
    "deploy/helm/penstock/VALUES.md": "helm-values.md",
    "deploy/helm/penstock/examples/roll-a-model.md": "helm-roll-a-model.md",
    "deploy/helm/penstock/examples/roll-triton.md": "helm-roll-triton.md",
    "deploy/haproxy/README.md": "haproxy.md",
    "deploy/monitoring/README.md": "monitoring.md",
    "deploy/monitoring/RUNBOOK.md": "runbook.md",
    "deploy/monitoring/RUNBOOK-video-gpu.md": "runbook-video-gpu.md",
    "deploy/release/README.md": "releases.md",
    "tests/README.md": "tests.md",
}
SOURCES = {page: source for source, page in PUBLISHED.items()}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"((?:^ {4}[^\n]*\n)+)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the published pages."""
    for source, page in PUBLISHED.items():
        files.append(File.generated(config, page, content=(CHECKOUT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inserts the generated parts, rewrites links, and separates lists from the paragraph before, as GitHub does."""
    place = page.file.src_uri
    source = SOURCES.get(place, f"docs/{place}")
    lines = re.sub(r"(?m)^(?![*|>#\s]|- |\d+\. )(.+)\n(?=[*-] |1\. )", r"\1\n\n", markdown)
    text = site_links(lines, source)
    for name, generate in GENERATED.items():
        if (marker := f"<!-- generated: {name} -->") in text:
            text = text.replace(marker, generate())
    return text


def site_links(text: str, source: str) -> str:
    """The text of a page of the repository with links that work on the site."""

    def rewrite(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link.group()
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = PUBLISHED.get(inside) or (inside.removeprefix("docs/") if inside.startswith("docs/") else None)
        if page:
            return f"{mark}[{label}]({page}{hash_sign}{anchor})"
        if not (CHECKOUT / inside).exists():
            return link.group()  # a strict build reports it
        return f"`{inside}`" if label.strip("`") in (inside, path, Path(inside).name) else f"{label} (`{inside}`)"

    pieces = CODE.split(text)  # odd ones are code
    pieces[::2] = (LINK.sub(rewrite, piece) for piece in pieces[::2])
    return "".join(pieces)


def command_reference() -> str:
    """Every command with its arguments and options, from the typer apps."""
    return "\n".join(_command(name) for name in commands())


def _command(name: str) -> str:
    root = typer.main.get_command(build_app([name]))
    context = root.make_context("penstock", [], resilient_parsing=True)
    command = root.get_command(context, name)  # type: ignore[attr-defined]
    text = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="penstock", indent=1)
    return re.sub(r"(?m)^\* `-h, --help`.*\n", "", text)


def card_parameters() -> str:
    """Every picture parameter that a model's config.pbtxt may have."""
    rows = ((f"`{key}`", values, default) for key, (values, default) in PARAMETERS.items())
    return _table(("parameter", "values", "default"), rows)


def output_layouts() -> str:
    """Every output layout that ships."""
    rows = (
        (f"`{name}`", f"`{layout.network_type.value}` or `{layout.network_type.name.lower()}`", layout.outputs)
        for name, layout in LAYOUTS.items()
    )
    return _table(("layout", "network-type", "outputs"), rows)


def gateway_metrics() -> str:
    """Every metric of the gateway."""
    return _metrics("penstock_", METRICS)


def video_metrics() -> str:
    """Every metric of the video program."""
    return _metrics("penstock_video_", TABLE)


def _metrics(prefix: str, table: Iterable[Any]) -> str:
    rows = []
    for row in table:
        by = " By " + ", ".join(f"`{label}`" for label in row.labels) + "." if row.labels else ""
        rows.append((f"`{prefix}{row.name}`", row.kind.value.partition(",")[0], row.help + by))
    return _table(("metric", "type", "meaning, labels"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def section(source: str, heading: str) -> str:
    """The text under a heading of a page of the repository, with links for the site."""
    text = (CHECKOUT / source).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise PluginError(f"{source} has no heading {heading!r}; docs/how-it-works.md shows its text")
    return site_links(found[1].strip(), source)


GENERATED: Mapping[str, Callable[[], str]] = {
    "commands": command_reference,
    "card parameters": card_parameters,
    "output layouts": output_layouts,
    "gateway api": gateway_api,
    "gateway metrics": gateway_metrics,
    "video api": video_api,
    "video metrics": video_metrics,
    "follow a request": lambda: section("server/README.md", "Follow a request"),
    "follow a frame": lambda: section("deepstream_pipeline/README.md", "Follow a frame"),
}
