"""The video program: sources are decoded, batched, inferred, tracked and analysed; results go to sinks."""
