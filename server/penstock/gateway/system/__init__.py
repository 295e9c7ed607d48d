"""Reports of the system endpoints: state, processes, findings, logs and models."""
