"""Serves ONNX models from Triton's repository layout.

Copied beside Triton's model.py as `ort_serving`: its modules import each other relatively, nothing else of ours.
"""
