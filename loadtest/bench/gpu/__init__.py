"""One GPU shared by many processes, measured: MPS and batching, served against raw, JPEG over HTTP, faults."""
