"""Measurements taken at the server: metrics, Prometheus, Triton statistics, CPU, memory and GPU load."""
