"""The event store: events with snapshots, tracks, occupancy and positions, in a bounded SQLite database."""
