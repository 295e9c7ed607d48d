"""Probes of this machine, and the findings of `penstock doctor`."""
