"""Model folders: the public catalogue, downloads, golden checks and INT8 optimization."""
