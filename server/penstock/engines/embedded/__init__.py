"""The embedded engine: ONNX Runtime inside the gateway process, over Triton's model repository layout."""
