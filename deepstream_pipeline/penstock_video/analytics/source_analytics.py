"""The analytics of one source: runs the evaluators of its rules."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock_video.analytics.evaluators import (
    DirectionEvaluator,
    DwellEvaluator,
    LineCrossingEvaluator,
    OvercrowdingEvaluator,
    RoiEvaluator,
)
from penstock_video.analytics.ground import GroundPlane
from penstock_video.analytics.rules import (
    DirectionDetection,
    Dwell,
    LineCrossing,
    Overcrowding,
    Point,
    RoiFiltering,
    Rules,
    UserRule,
)
from penstock_video.analytics.scene import Presence, RuleEvaluator, RuleResult, Scene
from penstock_video.types import AnalyticsEvent, AnalyticsKind, Frame, FrameAnalytics, Tracks, counter_name

Rule = RoiFiltering | Overcrowding | LineCrossing | DirectionDetection | Dwell | UserRule


class SourceAnalytics:
    """The rules of one source; see interfaces.Analytics. Not thread-safe. labels: by class_id, for the counts' names.

    Events are in the order of the kinds in Rules, and of a kind's rules. counts: "KIND/RULE" for every rule
    (line-crossing: so far; others: now), "KIND/RULE/LABEL" for each class that is not 0, and "objects/LABEL". A line
    without a direction has two counters, "KIND/RULE.in" and "KIND/RULE.out".
    A frame that was not inferred changes nothing: it has the counts of the last inferred frame, and for each track the
    rules that held then.
    """

    def __init__(self, rules: Rules, labels: Sequence[str], *, presence: Presence | None = None) -> None:
        self._rules, self.labels = rules, tuple(labels)
        self._presence = presence or Presence()
        self._watches: list[tuple[Rule, str, RuleEvaluator]] = [
            (rule, f"{kind}/{rule.name}", watch) for kind, rule, watch in _evaluators(rules)
        ]
        self._plane = GroundPlane(rules.ground) if rules.ground is not None else None
        self._speeds: dict[int, float | None] = {}
        self._size = (0, 0)
        self._counts: dict[str, int] = {}
        self._names: dict[int, tuple[str, ...]] = {}

    def observe(self, frame: Frame, tracks: Tracks) -> FrameAnalytics:
        """What came true with this frame, and what is counted so far."""
        if tracks.is_estimate:
            return self._as_before(tracks)
        if (frame.width, frame.height) != self._size:
            self._fit(frame)
        scene = self._presence.see(frame, tracks)
        counts: dict[str, int] = {}
        self._count_classes(counts, "objects", Counter(scene.everybody.class_ids))
        events: list[AnalyticsEvent] = []
        names: list[tuple[str, ...]] = [()] * len(tracks) if self._watches else []
        lasting = list(names)
        for rule, key, watch in self._watches:
            said = watch.observe(scene)
            events += said.events
            for counter, total, by_class in _counters(key, said):
                counts[counter] = total
                self._count_classes(counts, counter, by_class)
            for row in said.rows:
                names[row] += (rule.name,)
                if not isinstance(rule, LineCrossing):  # a crossing is of its one frame
                    lasting[row] += (rule.name,)
        self._counts = counts
        self._names = dict(zip(scene.everybody.track_ids, lasting, strict=False))
        speeds = self._speeds_of(scene)
        return FrameAnalytics(tuple(events), dict(counts), tuple(names), speeds)

    def changed(self, rules: Rules) -> "SourceAnalytics":
        """Other rules from the next frame on, in place of this one. A rule that stays as it is goes on counting."""
        changed = SourceAnalytics(rules, self.labels, presence=self._presence)
        if (rules.config_width, rules.config_height) == (self._rules.config_width, self._rules.config_height):
            known = {rule: watch for rule, _, watch in self._watches}
            changed._watches = [(rule, key, known.get(rule, watch)) for rule, key, watch in changed._watches]
        return changed

    def restart(self) -> None:
        """The next frame is of another stream: earlier objects are gone, and counts stay."""
        self._presence.restart()

    def _as_before(self, tracks: Tracks) -> FrameAnalytics:
        track_ids = tracks.track_id.tolist()
        names = tuple(self._names.get(track_id, ()) for track_id in track_ids) if self._watches else ()
        speeds = tuple(map(self._speeds.get, track_ids)) if self._plane is not None else ()
        return FrameAnalytics((), dict(self._counts), names, speeds)

    def _speeds_of(self, scene: Scene) -> tuple[float | None, ...]:
        """Of each track; empty without a ground."""
        if self._plane is None:
            return ()
        trails = ((track_id, scene.sightings.get(track_id)) for track_id in scene.everybody.track_ids)
        self._speeds = {
            track_id: None if seen is None else self._plane.speed_mps(seen.trail) for track_id, seen in trails
        }
        return tuple(self._speeds[track_id] for track_id in scene.everybody.track_ids)

    def _fit(self, frame: Frame) -> None:
        self._size = (frame.width, frame.height)
        if self._plane is not None and self._rules.ground is not None:
            self._plane.fit(self._rules.scale(self._rules.ground.picture, frame.width, frame.height))
        for rule, _, watch in self._watches:
            watch.fit(self._rules.scale(_points_of(rule), frame.width, frame.height))

    def _count_classes(self, counts: dict[str, int], key: str, by_class: Counter[int]) -> None:
        for class_id, count in by_class.items():
            is_named = 0 <= class_id < len(self.labels)
            counts[f"{key}/{self.labels[class_id] if is_named else f'class {class_id}'}"] = count


def _points_of(rule: Rule) -> Sequence[Point]:
    """Points of the rule's shape; none for a user's rule, whose coordinates are pixels."""
    match rule:
        case LineCrossing():
            return rule.line
        case DirectionDetection():
            return rule.direction
        case UserRule():
            return ()
    return rule.polygon


def _counters(key: str, said: RuleResult) -> Iterable[tuple[str, int, Counter[int]]]:
    """(key, count, count by class_id) of each counter of a rule."""
    if not said.by_direction:
        return ((key, said.total, said.by_class),)
    return tuple((counter_name(key, way), found.total(), found) for way, found in said.by_direction.items())


_EVALUATORS: dict[AnalyticsKind, Callable[[Any], RuleEvaluator]] = {
    AnalyticsKind.ROI_FILTERING: RoiEvaluator,
    AnalyticsKind.OVERCROWDING: OvercrowdingEvaluator,
    AnalyticsKind.LINE_CROSSING: LineCrossingEvaluator,
    AnalyticsKind.DIRECTION_DETECTION: DirectionEvaluator,
    AnalyticsKind.DWELL: DwellEvaluator,
}


def _evaluators(rules: Rules) -> Iterator[tuple[str, Rule, RuleEvaluator]]:
    for kind, new in _EVALUATORS.items():
        for rule in rules.of(kind):
            yield kind, rule, new(rule)
    for user in rules.users:
        yield user.kind, user, user.new()
