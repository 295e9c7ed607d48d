"""The documentation builds as a site, its links work, and its commands and tables are those of the programs."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from docs.generate import CHECKOUT, PUBLISHED, output_layouts, section, site_links
from docs.rest_reference import gateway_api, video_api
from penstock.cli.main import build_app, commands
from penstock.metric_table import METRICS
from penstock.vision import card, parameters, prepare_parameters
from penstock.vision.layouts.registry import LAYOUTS
from penstock_video.metrics import TABLE

pytestmark = pytest.mark.xdist_group("docs")
PAGES = sorted({*PUBLISHED, *(f"docs/{path.name}" for path in (CHECKOUT / "docs").glob("*.md"))} - {"docs/upgrade.md"})
PLACEHOLDER = re.compile(r"[A-Z]{2,}|…|\$|\[|\.\.\.|\||>|&|\(")  # completed by a person, of a shell, or a drawing


def test_site_has_every_page(site: Path) -> None:
    """Each page of docs/ and each published page of the repository is built, and the navigation shows it."""
    names = {page.removeprefix("docs/") if page.startswith("docs/") else PUBLISHED[page] for page in PAGES}
    menu = (CHECKOUT / "mkdocs.yml").read_text().partition("nav:")[2]
    for name in names:
        assert (site / name).with_suffix(".html").is_file(), name
        assert re.search(rf"(?m)[ '\"]{re.escape(name)}$", menu), name


def test_site_needs_no_other_host(site: Path) -> None:
    """A page loads scripts, styles and pictures from the site alone."""
    for path in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", path.read_text())
        loaded += re.findall(
            r"<link\b[^>]*rel=\"?(?:stylesheet|preload|preconnect)[^>]*href=\"?([^\" >]+)", path.read_text()
        )
        assert [address for address in loaded if "://" in address or address.startswith("//")] == [], path.name


def test_reference_pages_have_all_rows(site: Path) -> None:
    """Every command, picture parameter and metric is on its page."""
    text = {name: (site / f"{name}.html").read_text() for name in ("commands", "card-parameters", "metrics")}
    assert all(f"penstock {name}</code>" in text["commands"] for name in commands())
    assert all(f">{key}</code>" in text["card-parameters"] for key in parameters.PARAMETERS)
    assert all(f"penstock_{row.name}</code>" in text["metrics"] for row in METRICS)
    assert all(f"penstock_video_{row.name}</code>" in text["metrics"] for row in TABLE)
    assert not any("generated:" in (site / path).read_text() for path in site.glob("*.html"))


def test_rest_reference_has_every_operation_with_its_role(site: Path) -> None:
    """The page lists each method and path of both OpenAPI documents, and the role that it needs."""
    text = (site / "rest-api.html").read_text()
    heads = re.findall(r"#### `(\w+ /\S+)`\n\n[^\n]*\n\nRole: (.+?)\. Answers", gateway_api() + video_api())
    assert len(heads) >= 80
    assert all(f"<code>{head}</code>" in text for head, _ in heads)
    roles = dict(heads)
    assert roles["GET /v1/logs"] == roles["PUT /v1/streams/{source_id}/rules"] == "`admin`"
    assert roles["GET /v1/events"] == roles["GET /v1/models"] == "`read`"
    assert roles["GET /v2/health/live"] == roles["GET /health/live"] == "none"


def test_picture_parameters_are_those_that_are_read() -> None:
    """Each documented parameter is read by the card, and each that is read is documented."""
    code = "".join(Path(module.__file__ or "").read_text() for module in (card, prepare_parameters))
    read = set(re.findall(r"\"([a-z]+(?:-[a-z]+)+|labels|layout|offsets|skeleton|characters|topk)\"", code))
    assert parameters.PARAMETERS.keys() == read


def test_every_output_layout_is_described() -> None:
    """Each layout of the registry has its row on the page of picture parameters."""
    text = output_layouts()
    assert all(f"\n| `{name}` |" in text and layout.outputs in text for name, layout in LAYOUTS.items())
    assert all(layout.outputs for layout in LAYOUTS.values())


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_accepted(page: str) -> None:
    """Every `penstock` command on the page has known sub-commands, options and values."""
    for line in re.findall(r"(?m)^    (?:\.venv/bin/)?(penstock .*)$", (CHECKOUT / page).read_text()):
        command = re.split(r"\s{2,}#|\s+#\s", line)[0]
        if PLACEHOLDER.search(command.replace("NAME=", "").replace("Ctrl-C", "")):
            continue
        try:
            parse(shlex.split(command)[1:])
        except typer.BadParameter as error:
            if "does not exist" not in error.message:
                raise


def parse(words: list[str]) -> None:
    """Parses a command line down to its last sub-command, and runs nothing. Raises typer.BadParameter and others."""
    at = typer.main.get_command(build_app(words[:1]))
    context = at.make_context("penstock", list(words))
    while (rest := [*context._protected_args, *context.args]) and hasattr(at, "resolve_command"):
        name, at, words = at.resolve_command(context, rest)
        context = at.make_context(name, words, parent=context)


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        ("README.md", "[Video](docs/video.md#rules)", "[Video](video.md#rules)"),
        ("docs/video.md", "[tests](../tests/README.md)", "[tests](tests.md)"),
        ("README.md", "![a](docs/images/street.jpg)", "![a](images/street.jpg)"),
        ("README.md", "[LICENSE](LICENSE)", "`LICENSE`"),
        (
            "docs/models.md",
            "[street](../model_repository/street/config.pbtxt)",
            "street (`model_repository/street/config.pbtxt`)",
        ),
        ("README.md", "[gone](docs/../gone.md)", "[gone](docs/../gone.md)"),
        ("README.md", "[there](https://example.org/a.md)", "[there](https://example.org/a.md)"),
        ("README.md", "    [code](docs/video.md)\n", "    [code](docs/video.md)\n"),
    ],
)
def test_link_of_a_repository_page_works_on_the_site(source: str, text: str, shown: str) -> None:
    """A link to a page stays a link, one to another file becomes its path, and one to nothing fails the build."""
    assert site_links(text, source) == shown


def test_section_that_is_gone_stops_the_build() -> None:
    """How it works shows parts of other pages by their headings; a renamed heading is an error, not a hole."""
    with pytest.raises(Exception, match="no heading 'Follow a parcel'"):
        section("server/README.md", "Follow a parcel")


def test_pictures_are_small_and_credited() -> None:
    """Every photo has at most 200 KB, and NOTICE names its author and licence."""
    photos = [path for path in (CHECKOUT / "docs" / "images").iterdir() if path.suffix != ".svg"]
    notice = (CHECKOUT / "NOTICE").read_text()
    assert photos
    for path in photos:
        assert path.stat().st_size <= 200_000, path.name
        assert re.search(rf"docs/images/{path.name} .*(Apache-2\.0|CC0)", notice), path.name
