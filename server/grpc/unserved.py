"""What is told of models that the engine would serve and the gateway does not."""

from collections.abc import Mapping

from tritonclient.grpc import service_pb2

UNAVAILABLE = "UNAVAILABLE"


def index_with_refusals(answer: bytes, asked: bytes, refusals: Mapping[str, str]) -> bytes:
    """A serialised RepositoryIndexResponse, the refused models as unavailable with the reason. asked: the request."""
    if not refusals:
        return answer
    index = service_pb2.RepositoryIndexResponse.FromString(answer)
    if service_pb2.RepositoryIndexRequest.FromString(asked).ready:
        kept = [row for row in index.models if row.name not in refusals]
        del index.models[:]
        index.models.extend(kept)
    for row in index.models:
        if row.state == "READY" and row.name in refusals:
            row.state, row.reason = UNAVAILABLE, refusals[row.name]
    told: bytes = index.SerializeToString()
    return told
