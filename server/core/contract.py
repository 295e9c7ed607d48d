"""What both transports keep of the wire contract: what is blocked, and the bounds that keep the engine alive."""

# Served by nobody yet: refused with 501 / UNIMPLEMENTED, and not advertised.
BLOCKED_EXTENSIONS = frozenset(("system_shared_memory", "cuda_shared_memory", "trace", "logging"))
# Triton 2.51 multiplies a shape without looking for overflow; FP32 [1, 2^62] without a byte ends the model's process.
MAX_ELEMENTS = 1 << 40
# A longer name of a file in a model load ends Triton 2.51.
MAX_FILE_NAME_BYTES = 255
