"""Inference: rows are sent to the gateway or the local stack, and outputs become detections."""
