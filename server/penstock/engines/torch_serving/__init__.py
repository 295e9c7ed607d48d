"""Serves exported PyTorch programs from Triton's repository layout: batches, precision, CUDA graphs, pictures.

Installed beside Triton's model.py as `torch_serving`: modules import each other relatively, and nothing else of
penstock.
"""
