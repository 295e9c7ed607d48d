"""Load tests that clients start: a child process at a time, and the folder of their results."""
