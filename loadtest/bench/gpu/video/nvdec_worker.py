"""One process of NVDEC alone: some threads, each with a decoder of its own that goes through a clip's packets for ever.

    python -m loadtest.bench.gpu.video.nvdec_worker CLIP THREADS

Says `ready` once each decoder has given 30 frames, takes a line of two moments of the monotonic clock, and answers with
what was decoded between them. The packets lie in memory as Annex B; nothing is copied, prepared or shown: the decoder's
own rate. Context and streams are as in the product: one stream a decoder, and who waits for the card sleeps.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import av
import numpy as np

from penstock_video.gpu.device import Device

_FILTERS = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
_LOOK_S, _WARM_S, _WARM_FRAMES = 0.001, 1.0, 30


def packets_of(clip: Path) -> tuple[str, list[Any]]:
    """(codec, the packets as arrays of bytes, Annex B)."""
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context.name
        annex_b = av.BitStreamFilterContext(_FILTERS[codec], stream)
        found = []
        for packet in container.demux(stream):
            found += [np.frombuffer(bytes(one), np.uint8).copy() for one in annex_b.filter(packet) if one.size]
    return codec, found


class DecoderLane:
    """A thread's decoder and what came of it so far."""

    def __init__(self, nvc: Any, codec: str, packets: list[Any], stream: int = 0) -> None:
        self._nvc, self._packets = nvc, packets
        kind = nvc.cudaVideoCodec.HEVC if codec == "hevc" else nvc.cudaVideoCodec.H264
        self._decoder = nvc.CreateDecoder(
            gpuid=0, codec=kind, cudacontext=0, cudastream=stream, usedevicememory=True,
            latency=nvc.DisplayDecodeLatencyType.LOW,
        )  # fmt: skip
        self.frames = 0
        self.is_warm, self.is_over = threading.Event(), False

    def run(self) -> None:
        """Until it is over. A clip begins with a keyframe, so the next time round needs no new decoder."""
        packet, number = self._nvc.PacketData(), 0
        packet.decode_flag = self._nvc.VideoPacketFlag.ENDOFPICTURE
        while not self.is_over:
            for body in self._packets:
                packet.bsl_data, packet.bsl, packet.pts = body.ctypes.data, body.size, number
                number += 1
                self.frames += len(self._decoder.Decode(packet))
                if self.frames >= _WARM_FRAMES:
                    self.is_warm.set()
                if self.is_over:
                    return


def main() -> None:
    """What the command line says."""
    clip, threads = Path(sys.argv[1]), int(sys.argv[2])
    import PyNvVideoCodec as nvc

    codec, packets = packets_of(clip)
    device = Device.open()
    streams = [device.new_stream() for _ in range(threads)]
    lanes = [DecoderLane(nvc, codec, packets, stream.handle) for stream in streams]
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
