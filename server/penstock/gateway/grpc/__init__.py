"""The gRPC side of the gateway: server, interceptors, GRPCInferenceService and its streams."""
