"""The catalogue's entries, and the folders that describe them to Triton."""

import re
import tomllib
from pathlib import Path

import pytest

from penstock.engines.config_pbtxt import read_config
from penstock.models.catalogue import CatalogueEntry, UnknownCatalogueModel, find_entry, read_catalogue
from penstock.vision.card import card_from_config

CATALOGUE = read_catalogue()
ENTRIES = list(CATALOGUE.values())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_catalogue_every_entry_is_complete(entry: CatalogueEntry) -> None:
    """Each model has an address by https, a size, a whole SHA-256, a licence and a folder that tells its hash."""
    assert entry.url.startswith("https://")
    assert entry.file_name.endswith(".onnx")
    assert entry.size_bytes > 0
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.licence
    assert {path.name for path in entry.folder.iterdir()} >= {"config.pbtxt", "MODEL.md"}
    assert not list(entry.folder.glob("*/")), "the model's file is pulled, not shipped"
    page = (entry.folder / "MODEL.md").read_text()
    assert entry.sha256 in page
    assert entry.served_sha256 in page
    assert entry.licence in page
    assert f"{entry.size_bytes:,} bytes" in page


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_catalogue_layout_is_the_cards(entry: CatalogueEntry) -> None:
    """The layout in the list is the one that the folder's card decodes with."""
    card = card_from_config(read_config(entry.folder / "config.pbtxt"))
    assert card is not None
    assert card.layout.name == entry.layout


def test_catalogue_marks_weights_that_were_never_decoded() -> None:
    """An entry is untried exactly if its page says that the real weights were not run."""
    marked = {entry.name for entry in ENTRIES if entry.untried}
    assert marked == {entry.name for entry in ENTRIES if "## Not run here" in (entry.folder / "MODEL.md").read_text()}
    assert "yolox-nano" not in marked


def test_catalogue_repeats_the_facts_that_it_was_given(shared_dir: Path) -> None:
    """Address, size, SHA-256 and licence of every entry are those of the list beside the checkout."""
    given = tomllib.loads((shared_dir / "models.toml").read_text())
    listed = [entry for entry in ENTRIES if entry.name in given]
    assert len(listed) == 9
    for entry in listed:
        row = given[entry.name]
        said = (entry.url, entry.size_bytes, entry.sha256, entry.licence)
        assert said == (row["url"], row["size"], row["sha256"], row["licence"]), entry.name


def test_find_entry_misspelt_name_suggests_the_close_one() -> None:
    """A typo is answered with the name that was meant."""
    with pytest.raises(UnknownCatalogueModel, match=r"no model 'fastesdet': did you mean fastestdet\?"):
        find_entry("fastesdet", CATALOGUE)


def test_find_entry_strange_name_lists_what_there_is() -> None:
    """A name that is close to nothing is answered with all names."""
    with pytest.raises(UnknownCatalogueModel, match="it has yolox-nano, fastestdet, resnet50, "):
        find_entry("xyz", CATALOGUE)


def test_read_catalogue_unknown_key_is_refused(tmp_path: Path) -> None:
    """A misspelt key of an entry does not pass unseen."""
    file = tmp_path / "models.toml"
    file.write_text('[x]\nabout = ""\nurl = ""\nsize_bytes = 1\nsha256 = ""\nlicense = ""\n')
    with pytest.raises(TypeError, match="license"):
        read_catalogue(file)
