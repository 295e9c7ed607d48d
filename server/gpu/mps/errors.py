"""What MPS is refused for, and how it fails."""


class MpsError(Exception):
    """MPS does not do what is asked of it. Its text is one sentence for the user: what is wrong, what to do."""


class MpsRefused(MpsError):
    """The control program answered, and said no."""


class MpsBusy(MpsError):
    """The daemon answers others, and none of our questions within the time: nothing is known of it."""


class MpsOtherProtocol(MpsError):
    """The daemon answers, and not as we know it: asking again is in vain."""


class MpsUnavailable(MpsError):
    """MPS cannot be had here: no GPU, no control program, or a setting that this card cannot keep."""
