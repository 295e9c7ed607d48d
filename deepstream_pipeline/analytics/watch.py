"""What a rule says of a frame, and the seam between the rules' kinds and the source's analytics."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from deepstream_pipeline.analytics.geometry import Scale
from deepstream_pipeline.analytics.scene import Scene
from deepstream_pipeline.types import AnalyticsEvent


@dataclass(slots=True)
class Said:
    """Of one frame. rows: of its tracks those for which the rule holds now.

    total, by_class: what the rule counts: so far, or what is there now; by class_id.
    """

    total: int
    by_class: Counter[int]
    rows: list[int] = field(default_factory=list)
    events: list[AnalyticsEvent] = field(default_factory=list)


class Watch(Protocol):
    """One rule of one source, with what it remembers of the objects that are not gone. Sans-IO."""

    def fit(self, scale: Scale) -> None:
        """The rule's shapes times this are in the source's pixels. Called before the first scene and at a change."""
        ...

    def observe(self, scene: Scene) -> Said:
        """The next frame. Forgets scene.gone."""
        ...


def now_there(rows: list[int], class_ids: Iterable[int], events: list[AnalyticsEvent]) -> Said:
    """Of a rule that counts who is there now."""
    return Said(len(rows), Counter(class_ids), rows, events)
