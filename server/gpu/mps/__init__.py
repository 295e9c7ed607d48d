"""NVIDIA's Multi-Process Service: its daemon's life, its clients, and what is done when either fails."""

from server.gpu.mps.presence import BELIEVED_S, PIPE_DIRECTORY, DaemonSight, daemon_listens

__all__ = ["BELIEVED_S", "PIPE_DIRECTORY", "DaemonSight", "daemon_listens"]
