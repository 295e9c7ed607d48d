"""Benches of one shared GPU: MPS and batching, Triton against raw execution, JPEG over HTTP, faults."""
