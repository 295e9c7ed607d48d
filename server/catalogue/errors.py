"""What can go wrong with models on disk. Each text is one sentence for a person, with the fix."""


class CatalogueError(Exception):
    """The root; the commands print its text and end with an exit code that is not 0."""


class UnknownModel(CatalogueError):
    """The catalogue has no such model."""


class PullFailed(CatalogueError):
    """A model could not be fetched, verified or put in its place; the repository is as it was."""


class Interrupted(PullFailed):
    """The other side broke off or fell silent in the middle of the file: what came is kept, and can be continued."""


class WrongContent(PullFailed):
    """What came is not the file that the catalogue describes: another size or another SHA-256."""
