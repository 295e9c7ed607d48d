"""Serves ONNX models from Triton's repository layout. Installed beside Triton's model.py without penstock."""
