"""One suite for every engine behind the same seam."""
