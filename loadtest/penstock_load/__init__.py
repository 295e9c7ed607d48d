"""Load tests: open-loop load, measurements, verdicts against targets, and reports."""
