"""Decodes one source: URI, packets, H.264 and HEVC headers, pictures by FFmpeg or NVDEC, recording of packets."""
