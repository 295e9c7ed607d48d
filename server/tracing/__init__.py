"""Spans of requests for an OpenTelemetry collector; nothing of it is loaded, and nothing costs, where it is off."""
