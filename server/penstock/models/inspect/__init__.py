"""Reads an ONNX file of a vision model: what it is, the card that it needs, and what only its user can say."""
