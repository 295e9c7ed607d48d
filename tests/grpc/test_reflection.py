"""gRPC's reflection protocol at the front."""

from grpc_reflection.v1alpha import reflection_pb2

from tests.grpc.harness import Front

METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def _asked(front: Front, request: reflection_pb2.ServerReflectionRequest) -> bytes:
    call = front.channel.stream_stream(METHOD, None, None)()
    await call.write(request.SerializeToString())
    answer = await call.read()
    await call.done_writing()
    assert isinstance(answer, bytes)
    return answer


async def test_reflection_lists_what_is_served(front: Front) -> None:
    """Inference, health, and reflection itself."""
    answer = reflection_pb2.ServerReflectionResponse.FromString(
        await _asked(front, reflection_pb2.ServerReflectionRequest(list_services=""))
    )
    assert [service.name for service in answer.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]


async def test_reflection_describes_the_inference_service(front: Front) -> None:
    """The file of its methods, and those that it needs; an unknown symbol is not found."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
    answer = reflection_pb2.ServerReflectionResponse.FromString(await _asked(front, request))
    files = answer.file_descriptor_response.file_descriptor_proto
    assert any(b"ModelStreamInfer" in file for file in files)
    assert len(files) == 2

    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.Other")
    answer = reflection_pb2.ServerReflectionResponse.FromString(await _asked(front, request))
    assert answer.error_response.error_code == 5
