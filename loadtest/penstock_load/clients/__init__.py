"""Clients for the server under test: image endpoint, v2 REST, gRPC, gRPC streams and control APIs."""
