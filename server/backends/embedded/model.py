"""What became of one name in the repository: which versions serve it, and why the others do not."""

import asyncio
import re
from dataclasses import dataclass, field

from server.backends.embedded.loaded import LoadedVersion
from server.backends.embedded.loaded_opening import OpenedModel, StateOnDisk
from server.core.errors import BackendUnavailable, InvalidRequest, ModelNotFound
from server.core.model import ModelState

UNLOADED = "unloaded"
_LEADING_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,40}", re.ASCII)
_TOO_LARGE = 2**63


@dataclass(slots=True)
class Model:
    """lock: held by whoever loads or unloads. state_on_disk: what the serving versions were made from."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_loading: bool = False
    state_on_disk: StateOnDisk | None = None
    serving: dict[int, LoadedVersion] = field(default_factory=dict)
    leaving: list[LoadedVersion] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def install(self, model: OpenedModel, *, max_waiting: int) -> None:
        """All or nothing, as in Triton: where a version failed, those that serve go on and no new one begins."""
        if model.failures:
            if not self.serving:
                self.reasons = dict.fromkeys(model.opened, UNLOADED) | dict(model.failures)
            return
        old = self.serving
        self.serving = {
            version: LoadedVersion(opened, max_waiting=max_waiting) for version, opened in model.opened.items()
        }
        self.reasons = {version: UNLOADED for version in old if version not in self.serving}
        self.state_on_disk = model.state_on_disk
        self._retire(old)

    def remove(self) -> None:
        """No new requests; those that are here finish."""
        old, self.serving, self.state_on_disk = self.serving, {}, None
        self.reasons |= dict.fromkeys(old, UNLOADED)
        self._retire(old)

    def stop(self, error: BackendUnavailable) -> list[LoadedVersion]:
        """Ends every version at once; the ones to wait for."""
        versions = [*self.serving.values(), *self.leaving]
        self.serving = {}
        for version in versions:
            version.stop(error)
        return versions

    def find(self, version: str) -> LoadedVersion:
        """The version of that number, the highest where it is empty. Raises InvalidRequest, ModelNotFound."""
        if not self.serving:
            raise ModelNotFound(f"Request for unknown model: '{self.name}' has no available versions")
        number = version_number(version)
        if number is None:
            return self.serving[max(self.serving)]
        if number not in self.serving:
            raise ModelNotFound(f"Request for unknown model: '{self.name}' version {number} is not found")
        return self.serving[number]

    def rows(self) -> list[ModelState]:
        """Its rows of the repository index; none where it was never loaded."""
        self._forget_drained()
        states = {number: ("UNAVAILABLE", reason) for number, reason in self.reasons.items()}
        states |= {version.version: ("UNLOADING", "") for version in self.leaving}
        states |= dict.fromkeys(self.serving, ("READY", ""))
        rows = [ModelState(self.name, str(number), *states[number]) for number in sorted(states)]
        if self.is_loading and not self.serving:
            return [ModelState(self.name, row.version, "LOADING", "") for row in rows] or [
                ModelState(self.name, "", "LOADING", "")
            ]
        return rows

    def _retire(self, versions: dict[int, LoadedVersion]) -> None:
        self.leaving += versions.values()
        for version in versions.values():
            version.retire()
        self._forget_drained()

    def _forget_drained(self) -> None:
        self.leaving = [version for version in self.leaving if not version.drained.is_set()]


def version_number(version: str) -> int | None:
    """None for the engine's choice, else the number that the text begins with, as C++ reads it.

    Raises InvalidRequest in Triton's words.
    """
    if not version:
        return None
    wanted = "version should be an integral value > 0"
    leading = _LEADING_NUMBER.match(version)
    number = int(leading[0]) if leading is not None else _TOO_LARGE
    if abs(number) >= _TOO_LARGE:
        raise InvalidRequest(
            f"failed to get model version from specified version string '{version}' (details: stol), {wanted}"
        )
    if number < 0:
        raise InvalidRequest(f"invalid model version specified '{version}' , {wanted}")
    return number
