"""Triton's Python backend gets paths that its shell line leaves alone."""

import shlex
from pathlib import Path

import pytest

from penstock.engines.triton.runtime import is_special, plain_paths


def test_plain_paths_link_only_what_a_shell_would_split(tmp_path: Path) -> None:
    """Order and contents are the repositories' own; a path that is fine stays as it is."""
    plain, spaced = tmp_path / "models", tmp_path / "my models; rm"
    for repository in (plain, spaced):
        (repository / "people").mkdir(parents=True)
    links = tmp_path / "run" / "repositories"
    links.parent.mkdir()
    first, second = plain_paths((plain, spaced), links)
    assert first == plain
    assert not is_special(second)
    assert second.resolve() == spaced
    assert [item.name for item in second.iterdir()] == ["people"]


def test_plain_paths_of_plain_repositories_make_nothing(tmp_path: Path) -> None:
    """The usual case leaves no folder behind."""
    assert plain_paths((tmp_path,), tmp_path / "links") == (tmp_path,)
    assert not (tmp_path / "links").exists()


@pytest.mark.parametrize("name", ["people", "yolo-v8_n.2", "größe", "a+b@c,d:e%f=g"])
def test_is_special_leaves_ordinary_names_alone(name: str) -> None:
    """Letters of any language, digits and what file names usually have."""
    assert not is_special(name)


@pytest.mark.parametrize("sign", [sign for sign in map(chr, range(128)) if sign.isprintable() or sign.isspace()])
def test_is_special_knows_every_sign_that_a_shell_wants_quoted(sign: str) -> None:
    """What the standard library would quote."""
    assert is_special(f"a{sign}b") == (shlex.quote(sign) != sign)
