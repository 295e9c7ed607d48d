"""Serves exported PyTorch programs from Triton's repository layout: batches, precision, CUDA graphs, pictures.

Copied beside Triton's model.py as `torch_serving`: its modules import each other relatively, nothing else of ours.
"""
