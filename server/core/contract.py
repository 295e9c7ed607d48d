"""What both transports keep of the wire contract: what is blocked, and the bounds that keep the engine alive."""

# Served by nobody yet: refused with 501 / UNIMPLEMENTED, and not advertised.
BLOCKED_EXTENSIONS = frozenset(("system_shared_memory", "cuda_shared_memory", "trace", "logging"))
# What a caller of those, or of another of Triton's services that is not served here, is told; the same over both.
NO_SHARED_MEMORY = "this gateway does not register shared memory; send tensors in the request"
NO_TRACE_SETTINGS = "this gateway does not pass trace settings on; set them where the engine is started"
NO_LOG_SETTINGS = "this gateway does not pass log settings on; set them where the engine is started"
NO_GENERATION = "this gateway does not serve generation; send tensors to the model's /infer"
# Triton 2.51 multiplies a shape without looking for overflow; FP32 [1, 2^62] without a byte ends the model's process.
MAX_ELEMENTS = 1 << 40
# A longer name of a file in a model load ends Triton 2.51.
MAX_FILE_NAME_BYTES = 255
