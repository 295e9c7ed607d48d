"""Bench of the video program on a CPU."""
