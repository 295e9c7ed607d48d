"""Development benches: each compares two ways to do the same. Not packaged; run from the root of a checkout."""
