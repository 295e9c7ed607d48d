"""The commands `penstock video …`."""
