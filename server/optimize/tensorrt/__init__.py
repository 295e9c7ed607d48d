"""`penstock models optimize --tensorrt`: a float ONNX model to a plan for Triton's own TensorRT backend.

    source → samples → (INT8: QDQ) → half precision where TensorRT wants it told → build | cache → engine → what it
    fused, how close it computes, what it sees, how fast → folder

Never run by this project: no TensorRT was at hand. The calls are those of NVIDIA's Python API of 10.x (8.6 and 11.x
where they differ); the tests have a stand-in of that API, and the CUDA driver's part ran on a real card.
"""
