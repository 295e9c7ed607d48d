"""The commands of `penstock load`."""
