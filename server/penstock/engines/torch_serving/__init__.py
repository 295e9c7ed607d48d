"""Serves exported PyTorch programs from Triton's repository layout. Installed beside Triton's model.py."""
