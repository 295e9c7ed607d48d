import penstock  # noqa: F401 - it sets ORT_DISABLE_TELEMETRY before ONNX Runtime is imported
