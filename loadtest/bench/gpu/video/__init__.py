"""Bench of the video streams that one GPU decodes, infers and tracks."""
