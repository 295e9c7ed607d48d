"""The bodies of the wire as structs, for its description: tensors themselves are never read into these."""
