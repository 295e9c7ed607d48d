"""Plans that were built already, by everything that a plan depends on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec


class PlanKey(msgspec.Struct, frozen=True):
    """What a plan is good for. A plan of another card, TensorRT or driver may fail, or be slower than one of its own.

    capability: "9.0". card: as the driver calls it, since two cards of one capability are tuned differently.
    profile: the batch profile as text. network_sha256: of the ONNX bytes that TensorRT reads.
    """

    capability: str
    card: str
    tensorrt: str
    driver: str
    precision: str
    profile: str
    network_sha256: str

    @property
    def digest(self) -> str:
        """A file's name for it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]


class _Note(msgspec.Struct, frozen=True):
    """What lies beside a plan."""

    key: PlanKey
    plan_sha256: str
    build_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The serialized engine. build_s: what building took, once. is_cached: whether that was an earlier time."""

    content: bytes
    build_s: float
    is_cached: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


class PlanCache:
    """A folder of plans; everything in it may be deleted at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: PlanKey) -> Plan | None:
        """None where there is none, or one that is damaged, or one of another key."""
        try:
            note = msgspec.json.decode((self._folder / f"{key.digest}.json").read_bytes(), type=_Note)
            content = (self._folder / f"{key.digest}.plan").read_bytes()
        except (OSError, msgspec.DecodeError):
            return None
        plan = Plan(content, note.build_s, is_cached=True)
        return plan if note.key == key and note.plan_sha256 == plan.sha256 else None

    def keep(self, key: PlanKey, plan: Plan) -> None:
        """The plan first, the note that makes it valid last. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        note = _Note(key, plan.sha256, plan.build_s)
        for suffix, content in ((".plan", plan.content), (".json", msgspec.json.encode(note))):
            unfinished = self._folder / f"{key.digest}{suffix}.unfinished"
            unfinished.write_bytes(content)
            unfinished.replace(self._folder / f"{key.digest}{suffix}")
