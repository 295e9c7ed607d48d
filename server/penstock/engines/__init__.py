"""Inference engines behind one protocol: shared parts (health, circuit breakers, replicas), one package per engine."""
