"""A decode process with several cameras that decodes by FFmpeg, and says it is NVDEC: the threads are the real ones."""

import os
import socket
import sys
import time
from typing import Any

from penstock_video.sources.child import settle


def main() -> int:
    """Until its control socket ends."""
    from penstock_video.decode.codec import SoftwareCodec
    from penstock_video.sources.child_link import ParentLink, SlotWriter
    from penstock_video.sources.child_work import Tools, Work, read_start
    from penstock_video.sources.ring import Ring, RingSize
    from penstock_video.sources.shared_child import serve
    from penstock_video.types import DecoderKind

    class Disguised(SoftwareCodec):
        kind = DecoderKind.NVDEC  # type: ignore[assignment]

    def codec(stream: Any, context: Any) -> SoftwareCodec:
        context.thread_count = 1
        return Disguised(stream, context)

    def run(link: socket.socket, ring_fd: int) -> int:
        start = read_start(link)
        if start is None:
            return 2
        ring = Ring(ring_fd, RingSize(start.ring_frames, start.slot_bytes))
        ring.close()
        return Work(ParentLink(link, start), ring, start, Tools(codec, SlotWriter, time.thread_time)).run()

    with socket.socket(fileno=int(sys.argv[-1])) as control:
        return serve(control, run)


if __name__ == "__main__":
    settle(int(sys.argv[-2]))
    os._exit(main())
