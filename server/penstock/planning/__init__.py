"""Offline comparison of batching policies: the gateway's own queue and others under a manual clock."""
