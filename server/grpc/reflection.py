"""gRPC's reflection protocol: what is served here, for grpcurl and its kind."""

import grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from server.grpc.health import SERVICE as HEALTH
from server.grpc.servicer import SERVICE as INFERENCE

SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def reflection_handlers() -> (
    "grpc.GenericRpcHandler[reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse]"
):
    """Lists and describes the inference service, the health service and itself."""
    servicer = ReflectionServicer((INFERENCE, HEALTH, SERVICE))
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                servicer.ServerReflectionInfo,
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
        },
    )
