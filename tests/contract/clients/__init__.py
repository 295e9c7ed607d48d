"""Other people's clients, unmodified, asked of the gateway and of the bare Triton behind it."""
