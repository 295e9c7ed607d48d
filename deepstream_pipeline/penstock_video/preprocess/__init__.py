"""Pictures to model input rows, on the CPU or on the GPU, equal to the gateway's preprocessing."""
