"""What model.py does with ONNX Runtime, apart from Triton: no module here imports triton_python_backend_utils."""
