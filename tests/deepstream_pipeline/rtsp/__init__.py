"""The RTSP test rig: GStreamer's server under Debian's Python, and servers that answer badly."""
