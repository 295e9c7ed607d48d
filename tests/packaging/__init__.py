"""The wheel: what is in it, and that it serves where there is no checkout."""
