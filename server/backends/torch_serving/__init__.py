"""What serving an exported PyTorch program in Triton's layout takes: batches, precision, CUDA graphs, copies, pictures.

It lies beside Triton's model.py as `torch_serving`, and tests import it as `server.backends.torch_serving`: its modules
import each other relatively, and nothing else of ours. config, buckets and batch are pure and know no torch.
"""
