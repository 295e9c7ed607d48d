"""What serving an ONNX model in Triton's layout takes, apart from who serves it.

One source under two names: the embedded engine imports `server.backends.ort_serving`, and Triton's interpreter
`ort_serving`, which lies beside model.py there. So its modules import each other relatively, and nothing else of ours.
"""
