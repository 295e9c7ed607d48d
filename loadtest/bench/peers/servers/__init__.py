"""What runs in the peers' own environments: one file a peer, and the vision that they share. No import of ours."""
