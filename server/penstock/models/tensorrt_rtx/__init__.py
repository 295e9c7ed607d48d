"""Builds TensorRT-RTX engines of ONNX files on the CPU, and reports which nodes each layer of an engine holds."""
