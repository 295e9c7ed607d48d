"""INT8 quantization of a float ONNX model, with its measured accuracy and speed."""
