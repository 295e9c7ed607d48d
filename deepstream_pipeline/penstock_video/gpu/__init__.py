"""The GPU as the video program uses it: CUDA memory, streams, kernels and shared allocations."""
