"""Sinks: files, HLS, RTSP, previews and message brokers; drawing and encoding."""
