"""The running pipeline: dispatch to the engine, results in order, secondary models, sink threads and recordings."""
