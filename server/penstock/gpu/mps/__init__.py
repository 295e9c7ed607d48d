"""NVIDIA's Multi-Process Service: the control daemon, its clients, and recovery when either fails."""

from penstock.gpu.mps.control import PIPE_DIRECTORY, PRESENCE_TTL_S, DaemonPresence, daemon_listens

__all__ = ["PIPE_DIRECTORY", "PRESENCE_TTL_S", "DaemonPresence", "daemon_listens"]
