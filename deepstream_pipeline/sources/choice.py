"""Which decoder a source is given, and with whom it shares a process. Sans-IO: every method is told the time.

A process that died may have been killed by what one of its cameras sent. So for a while they sit with nobody but each
other, where the culprit can end no other's process; and who loses a second one sits alone.
"""

from collections import deque

from deepstream_pipeline.types import DecoderKind

CPU_FOR_S = 3600.0  # from then on a stream that is opened anew is shown to the card again
CARD_GONE_FOR_S = 60.0  # the same, where the card and not the stream was the reason
LOSSES, LOSSES_WITHIN_S = 2, 60.0
ALONE_FOR_S = 600.0
ALONE = "alone"


class DecoderChoice:
    """Of one source. wish: its configuration's. absence: why no card decodes here, None where one does.

    refusal: why its wish cannot be met, empty where it can.
    """

    def __init__(self, wish: DecoderKind, absence: str | None) -> None:
        is_refused = wish is DecoderKind.NVDEC and absence is not None
        self.refusal = f"decoder nvdec: {absence}; choose auto or cpu" if is_refused else ""
        self.may_use_cpu = wish is not DecoderKind.NVDEC
        self._is_cpu_only = wish is DecoderKind.CPU or absence is not None
        self._cpu_until = self._alone_until = -1.0
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._lost = ""  # the process, last

    def kind(self, now: float) -> DecoderKind:
        """cpu or nvdec, for a run that begins now."""
        is_cpus = self._is_cpu_only or (self.may_use_cpu and now < self._cpu_until)
        return DecoderKind.CPU if is_cpus else DecoderKind.NVDEC

    def company(self, now: float) -> str:
        """With whom a run that begins now may share its process: who says the same. ALONE for nobody."""
        if now < self._alone_until:
            return ALONE
        return self._lost if self._losses and now - self._losses[-1] < LOSSES_WITHIN_S else ""

    def needs_cpu(self, now: float) -> None:
        """The card's video engine does not take it."""
        self._cpu_until = now + CPU_FOR_S

    def has_no_card(self, now: float) -> None:
        """The card cannot be used at this time, or has no room for one more."""
        self._cpu_until = max(self._cpu_until, now + CARD_GONE_FOR_S)

    def lost_process(self, now: float, name: str) -> None:
        """That process died, and nobody knows by whose fault: of several cameras, it may be this one's."""
        self._lost = name
        self._losses.append(now)
        if len(self._losses) == LOSSES and now - self._losses[0] <= LOSSES_WITHIN_S:
            self._alone_until = now + ALONE_FOR_S

    def broke_promise(self, now: float) -> None:
        """It is known that its own run ended the process."""
        self._alone_until = now + ALONE_FOR_S
