"""Sources: one decode process a camera, or several cameras a process; the parent's side and the child's side."""
