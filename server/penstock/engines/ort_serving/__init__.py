"""Serves ONNX models from Triton's repository layout.

Installed beside Triton's model.py as `ort_serving`: modules import each other relatively, and nothing else of penstock.
"""
