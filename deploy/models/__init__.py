import server  # noqa: F401 - which tells ONNX Runtime, before it is imported, to report to nobody
