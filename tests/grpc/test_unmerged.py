"""The config of a model whose rows are not merged says so."""

from tritonclient.grpc import service_pb2

from penstock.protocol.engine import UNMERGED
from tests.grpc.harness import Front


async def test_config_says_why_rows_are_not_merged(front: Front) -> None:
    """It has a parameter with the reason; all else is the engine's. Other models do not have the parameter."""
    question = service_pb2.ModelConfigRequest(name="double").SerializeToString()
    engines = service_pb2.ModelConfigResponse.FromString(await front.call("ModelConfig", question))
    assert UNMERGED not in engines.config.parameters
    front.plane.unmerged = {"double": "output 'y' has a row for each object"}
    answer = service_pb2.ModelConfigResponse.FromString(await front.call("ModelConfig", question))
    assert answer.config.parameters.pop(UNMERGED).string_value == "output 'y' has a row for each object"
    assert answer == engines
