"""One process of NVDEC alone: some threads, each with a decoder of its own that goes through a clip's packets for ever.

    python -m loadtest.bench.gpu.video.nvdec_worker CLIP THREADS

Says `ready` once each decoder has given 30 frames, takes a line of two moments of the monotonic clock, and answers with
what was decoded between them. The packets lie in memory as Annex B; nothing is copied, prepared or shown: the decoder's
own rate. Context and streams are as in the product: one stream a thread, and who waits for the card sleeps. Decoders
are not shared.
"""

import json
import sys
import threading
import time
from pathlib import Path

import av

from penstock_video.decode.nvcodec import NvdecOpener
from penstock_video.gpu.device import CudaStream, Device

_FILTERS = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
_LOOK_S, _WARM_S, _WARM_FRAMES = 0.001, 1.0, 30


def packets_of(clip: Path) -> tuple[str, list[bytes]]:
    """(codec, the packets in Annex B)."""
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context.name
        annex_b = av.BitStreamFilterContext(_FILTERS[codec], stream)
        found = []
        for packet in container.demux(stream):
            found += [bytes(one) for one in annex_b.filter(packet) if one.size]
    return codec, found


class DecoderLane:
    """A thread's decoder and what came of it so far."""

    def __init__(self, device: Device, opener: NvdecOpener, clip: Path, stream: CudaStream) -> None:
        codec, self._packets = packets_of(clip)
        with av.open(str(clip)) as container:
            context = container.streams.video[0].codec_context
            size = context.width, context.height
        self._device = device
        self._decoder = opener(codec, stream.handle, size)
        self.frames = 0
        self.is_warm, self.is_over = threading.Event(), False

    def run(self) -> None:
        """Until it is over. A clip begins with a keyframe, so the next time round needs no new decoder."""
        self._device.bind()
        number = 0
        while not self.is_over:
            for packet in self._packets:
                self.frames += len(self._decoder.decode(packet, number))
                number += 1
                if self.frames >= _WARM_FRAMES:
                    self.is_warm.set()
                if self.is_over:
                    return


def main() -> None:
    """What the command line says."""
    clip, threads = Path(sys.argv[1]), int(sys.argv[2])
    device = Device.open()
    opener = NvdecOpener(device)
    opener.is_alone = True
    lanes = [DecoderLane(device, opener, clip, device.new_stream()) for _ in range(threads)]
    threads_of = [threading.Thread(target=lane.run, daemon=True) for lane in lanes]
    for thread in threads_of:
        thread.start()
    for lane, thread in zip(lanes, threads_of, strict=True):
        while not lane.is_warm.wait(_WARM_S):
            if not thread.is_alive():
                raise SystemExit("a decoder failed")  # its own words stand above
    print("ready", flush=True)
    begin_s, end_s = map(float, sys.stdin.readline().split())
    _wait(begin_s)
    before, cpu_s, began_s = sum(lane.frames for lane in lanes), time.process_time(), time.monotonic()
    _wait(end_s)
    frames, seconds = sum(lane.frames for lane in lanes) - before, time.monotonic() - began_s
    print(json.dumps({"frames": frames, "seconds": seconds, "cpu_s": time.process_time() - cpu_s}), flush=True)
    for lane in lanes:
        lane.is_over = True


def _wait(until_s: float) -> None:
    time.sleep(max(until_s - time.monotonic(), _LOOK_S))


if __name__ == "__main__":
    main()
