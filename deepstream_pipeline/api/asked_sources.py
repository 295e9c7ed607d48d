"""What a caller may add: which ids and addresses; and how a source is shown to callers."""

from collections.abc import Iterable
from dataclasses import replace
from urllib.parse import urlsplit

from deepstream_pipeline.api.answers import Refusal
from deepstream_pipeline.api.bodies import Stream
from deepstream_pipeline.api.options import ApiOptions
from deepstream_pipeline.decode.uri import UriKind, kind_of, redacted
from deepstream_pipeline.types import SourceConfig, SourceState, SourceStatistics

_IS = {SourceState.ENDED: "has ended", SourceState.FAILED: "has failed"}
OVER = tuple(_IS)


def asked_source(config: SourceConfig, options: ApiOptions) -> SourceConfig:
    """The source that an API client asks for, marked as from the API.

    What its host name and its redirects resolve to is checked when the source is opened.

    Raises SourceNotAllowed for what no source can be, and Refusal (403) for a file or device where callers may add
    none, and for a host that is plainly not for them.
    """
    kind = kind_of(config.uri)
    if kind in (UriKind.FILE, UriKind.DEVICE):
        if not options.takes_files:
            raise Refusal(
                403, "files and devices of this machine cannot be added through the API; allow it, or give a URL"
            )
    elif why := options.outbound.why_refused_unresolved(urlsplit(config.uri).hostname or ""):
        raise Refusal(403, why)
    return replace(config, is_from_api=True)


def stream_of(statistics: SourceStatistics) -> Stream:
    """As callers see it: nobody is shown a user or password, whoever forgot to hide them."""
    stream = Stream.model_validate(statistics)
    return stream.model_copy(update={"uri": redacted(stream.uri)})


def found_in(statistics: Iterable[SourceStatistics], source_id: str) -> SourceStatistics:
    """That source. Raises Refusal (404) where there is none."""
    found = next((each for each in statistics if each.source_id == source_id), None)
    if found is None:
        raise Refusal(404, f"no source {source_id!r}")
    return found


def refuse_over(source: SourceStatistics) -> None:
    """Raises Refusal (409) for a source that ended or failed: nothing more comes of it."""
    if source.state in OVER:
        raise Refusal(409, f"{source.source_id!r} {_IS[source.state]}; to read it anew remove it and add it again")


def refuse_pictureless(source: SourceStatistics) -> None:
    """Raises Refusal (409) where no picture comes of it as it is."""
    if source.state is SourceState.PAUSED:
        raise Refusal(409, f"{source.source_id!r} is paused and has no picture; resume it")
    refuse_over(source)
