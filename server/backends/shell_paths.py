"""Paths for Triton's Python backend, which starts a model's process by a shell line that quotes nothing.

With a space in its path the process gets the wrong arguments and aborts, and Triton waits for it for ever.
"""

import re
from collections.abc import Iterable
from pathlib import Path

_SPECIAL = re.compile(r"[^\w@%+=:,./-]")  # as shlex has it, but letters of every language are plain


def is_special(path: Path | str) -> bool:
    """Whether a shell reads something else than the path in it."""
    return _SPECIAL.search(str(path)) is not None


def plain_paths(repositories: Iterable[Path], links: Path) -> tuple[Path, ...]:
    """The repositories in their order, each by a path that a shell leaves as it is: its own, or a link in `links`.

    links: a folder of ours with a plain path, made when it is needed. Raises OSError.
    """
    return tuple(_plain_path(path.absolute(), links / str(number)) for number, path in enumerate(repositories))


def _plain_path(repository: Path, link: Path) -> Path:
    if not is_special(repository):
        return repository
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(repository, target_is_directory=True)
    return link
