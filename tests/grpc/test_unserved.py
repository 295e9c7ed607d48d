"""Models that the engine would serve and the gateway does not."""

from tritonclient.grpc import service_pb2

from tests.grpc.harness import Front


async def test_refused_model_is_unavailable_in_the_index_and_not_ready(front: Front) -> None:
    """Every method that reports readiness reports a withheld model as not ready."""
    front.plane.unserved = {"texts": "slo_p99_ms is 'fast'"}
    asked = service_pb2.RepositoryIndexRequest(ready=True).SerializeToString()
    index = service_pb2.RepositoryIndexResponse.FromString(await front.call("RepositoryIndex"))
    ready = service_pb2.RepositoryIndexResponse.FromString(await front.call("RepositoryIndex", asked))
    rows = {row.name: (row.state, row.reason) for row in index.models}
    assert rows["texts"] == ("UNAVAILABLE", "slo_p99_ms is 'fast'")
    assert {row.name for row in ready.models} == {name for name in rows if name != "texts"}
    for name, is_ready in (("texts", False), (next(iter(ready.models)).name, True)):
        question = service_pb2.ModelReadyRequest(name=name).SerializeToString()
        answer = service_pb2.ModelReadyResponse.FromString(await front.call("ModelReady", question))
        assert answer.ready is is_ready, name
