"""Dynamic batching with deadlines: one queue a model, and the engine calls that it forms."""
