"""What an instance is made of, apart from torch: a process that only looks at a configuration does not import it."""

from collections.abc import Sequence
from typing import Any, Protocol


class Pending(Protocol):
    """A run that was asked for."""

    def outputs(self) -> tuple[Any, ...]:
        """The outputs in the host's memory, one row a row of input, in the wire's types; waits for them.

        They are overwritten by a later run: what reads them must be done before `slots` more are begun.
        """


class Runner(Protocol):
    """Runs one program. Not thread-safe: its thread is the one that made it."""

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> Pending:
        """Start a run. columns: of each input the requests' tensors, in host or device memory, rows of them in all."""

    def picture_input(self, rows: int) -> Any:
        """Where the pictures of the next run go: (rows, C, H, W), of the network's type and memory format."""

    def begin_pictures(self, rows: int) -> Pending:
        """Start a run on what lies in picture_input."""
