"""Trackers that give detections an identity over time."""
