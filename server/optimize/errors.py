"""What can go wrong. Each text is one sentence for a person, with the way out."""


class OptimizeError(Exception):
    """The model cannot be optimised, or not with these pictures; nothing was written."""
