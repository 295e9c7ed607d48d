"""Policies of batching raced offline: the gateway's own queue under replayed profiles, on a manual clock."""
