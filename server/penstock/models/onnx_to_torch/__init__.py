"""Converts ONNX files of CNNs to programs of torch.export. operators and program run without Penstock and onnx."""
