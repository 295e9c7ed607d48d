"""Offline comparison of batching policies: the gateway's queue and others under a manual clock."""
