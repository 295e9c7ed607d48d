"""What a caller may add: which addresses, and how a source is shown to callers."""

from deepstream_pipeline.api.answers import Refusal
from deepstream_pipeline.api.bodies import Stream
from deepstream_pipeline.decode.uri import UriKind, kind_of, redacted
from deepstream_pipeline.types import SourceStatistics


def check_address(uri: str, *, takes_files: bool) -> None:
    """Raises SourceNotAllowed for what no source can be, and Refusal for a file or device where callers may add none.

    An address of the network is not looked at further: whoever may add cameras may make the program connect anywhere.
    """
    if kind_of(uri) in (UriKind.FILE, UriKind.DEVICE) and not takes_files:
        raise Refusal(403, "files and devices of this machine are not added through the API; allow it, or give a URL")


def stream_of(statistics: SourceStatistics) -> Stream:
    """As callers see it: nobody is shown a user or password, whoever forgot to hide them."""
    stream = Stream.model_validate(statistics)
    return stream.model_copy(update={"uri": redacted(stream.uri)})
