"""The control API and the preview page of the video program (HTTP, port 8010)."""
