"""Serves ONNX models from Triton's layout. Runs beside Triton's model.py, so it must not import penstock."""
