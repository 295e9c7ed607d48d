"""Benches of the gateway: image endpoint, relay, batching, and two checkouts compared."""
