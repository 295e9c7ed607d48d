"""What the system endpoints answer: processes, state, findings, logs."""
