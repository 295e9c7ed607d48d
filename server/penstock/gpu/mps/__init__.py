"""NVIDIA's Multi-Process Service: the control daemon, its clients, and recovery when either fails."""
