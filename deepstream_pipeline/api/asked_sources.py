"""What a caller may add: which ids and addresses; and how a source is shown to callers."""

from collections.abc import Iterable

from deepstream_pipeline.api.answers import Refusal
from deepstream_pipeline.api.bodies import Stream
from deepstream_pipeline.decode.uri import UriKind, kind_of, redacted
from deepstream_pipeline.source_ids import ID_FORM, is_source_id
from deepstream_pipeline.types import SourceState, SourceStatistics

_IS = {SourceState.ENDED: "has ended", SourceState.FAILED: "has failed"}
OVER = tuple(_IS)


def check_id(source_id: str) -> None:
    """Raises Refusal for an id that no source can have, as of a file that stands beside the source's folder."""
    if not is_source_id(source_id):
        raise Refusal(400, f"{source_id!r} cannot be a source's id: {ID_FORM}, and no file's name beside it")


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


def refuse_over(statistics: Iterable[SourceStatistics], source_id: str) -> None:
    """Raises Refusal (409) for a source that ended or failed: nothing more comes of it."""
    found = next((each for each in statistics if each.source_id == source_id), None)
    if found is not None and found.state in OVER:
        raise Refusal(409, f"{source_id!r} {_IS[found.state]}; to read it anew remove it and add it again")


def refuse_pictureless(statistics: Iterable[SourceStatistics], source_id: str) -> None:
    """Raises Refusal (404) where there is no such source, and (409) where no picture comes of it as it is."""
    found = next((each for each in statistics if each.source_id == source_id), None)
    if found is None:
        raise Refusal(404, f"no source {source_id!r}")
    if found.state is SourceState.PAUSED:
        raise Refusal(409, f"{source_id!r} is paused and has no picture; resume it")
    refuse_over((found,), source_id)
