"""Each kind of rubbish is rubbish: a plain reader gets no picture of it, and is not held for ever."""

import contextlib
import time

import av
import pytest
from av.error import FFmpegError

from tests.deepstream_pipeline.rtsp.rubbish import Rubbish, rubbish_server


@pytest.mark.parametrize("kind", Rubbish)
def test_rubbish_gives_no_picture(kind: Rubbish) -> None:
    """Within the reader's time-outs it fails, or is at its end; the server saw it come, and closes at once."""
    with rubbish_server(kind) as server:
        began = time.monotonic()
        pictures = 0
        try:
            options = {"rtsp_transport": "tcp", "analyzeduration": "500000"}
            with av.open(server.url, options=options, timeout=(2.0, 2.0)) as container:
                for packet in container.demux(video=0):
                    with contextlib.suppress(FFmpegError):
                        pictures += len(packet.decode())
                    if time.monotonic() - began > 4.0:
                        break
        except (FFmpegError, IndexError):
            pass
        assert pictures == 0
        assert server.connections >= 1
        ending = time.monotonic()
    assert time.monotonic() - ending < 5.0
    assert ending - began < 30.0
