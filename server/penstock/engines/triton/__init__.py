"""Triton Inference Server: clients of its HTTP and gRPC ports, and the supervisor of its process."""
