"""The gateway: checks, batches and relays requests over HTTP and gRPC, and starts the engine behind it."""
