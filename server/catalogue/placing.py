"""A model that is made here rather than fetched, into the repository under PENSTOCK_HOME: complete and at once."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.catalogue.landing import land, staging_folder
from server.catalogue.pull import repository_of


@contextmanager
def new_model_folder(home: Path, name: str) -> Iterator[Path]:
    """An empty folder for the caller to fill. A block that ends well makes it the model `name` in home's repository.

    An older folder of that name is replaced; readers see the old one or the new one. A block that raises leaves the
    repository as it was. Waits for another process that makes or pulls the same model. Raises OSError.
    """
    locks, repository = home / "downloads", repository_of(home)
    for folder in (locks, repository):
        folder.mkdir(parents=True, exist_ok=True)
    with (locks / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when the file is closed or we die
        with staging_folder(home / "staging", name) as staged:
            yield staged
            land(staged, repository / name)
