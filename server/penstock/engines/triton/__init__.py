"""Triton Inference Server: the clients of its HTTP and gRPC ports, and the supervisor of its process."""
