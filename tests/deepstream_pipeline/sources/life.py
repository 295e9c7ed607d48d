"""One source's watch, and a clock that the test moves."""

from penstock_video.sources.lifecycle import Action, LifecycleOptions, SourceLifecycle
from penstock_video.sources.protocol import EndReason
from penstock_video.types import SourceState

LIVE = LifecycleOptions(is_live=True)
FILE = LifecycleOptions(is_live=False, is_local=True)
LOOP = LifecycleOptions(is_live=False, is_local=True, is_loop=True)
REMOTE = LifecycleOptions(is_live=False)


class Life:
    """One source; each method moves the clock on, and says what was to be done."""

    def __init__(self, options: LifecycleOptions = LIVE, jitter: float = 0.0) -> None:
        self.now = 1000.0
        self.options = options
        self.watch = SourceLifecycle(options, self.now, lambda: jitter)
        self.frames = 0

    def start(self) -> None:
        """A process, as soon as it is wanted."""
        due = self.watch.next_wakeup()
        assert due is not None
        self.now = max(self.now, due)
        assert self.watch.tick(self.now) is Action.START
        self.watch.started(self.now)

    def open(self, fps: float = 25.0) -> None:
        self.start()
        self.watch.opened(self.now, fps, is_live=self.options.is_live)

    def play(self, seconds: float, fps: float = 25.0, digest: int | None = None) -> list[Action]:
        """Frames at an even rate; what was to be done of it."""
        actions = set()
        for _ in range(round(seconds * fps)):
            self.now += 1 / fps
            self.frames += 1
            actions.add(self.watch.tick(self.now))
            actions.add(self.watch.frame(self.now, self.frames if digest is None else digest, self.frames / fps))
        return sorted(actions - {Action.NONE}, key=lambda action: action.value)

    def run(self, seconds: float = 1.0) -> None:
        self.open()
        assert self.play(seconds) == []

    def wait(self, seconds: float) -> Action:
        """The first thing that time brings within so many seconds, at its moment."""
        until = self.now + seconds
        while (due := self.watch.next_wakeup()) is not None and due <= until:
            self.now = max(self.now, due)
            action = self.watch.tick(self.now)
            if action is not Action.NONE:
                return action
        self.now = until
        return Action.NONE

    def end(self, reason: EndReason, text: str = "so it is") -> None:
        self.watch.end_reported(self.now, reason, text)
        self.watch.process_ended(self.now, "ended with status 0")

    def die(self, how: str = "was ended by SIGSEGV") -> None:
        self.watch.process_ended(self.now, how)

    @property
    def state(self) -> SourceState:
        return self.watch.state
