"""Messages between a decode process and its parent (MessagePack over SOCK_SEQPACKET)."""

from enum import StrEnum

import msgspec

from penstock_video.types import DecoderSharing

MESSAGE_BYTES = 65_536  # limit of one message


class EndReason(StrEnum):
    """Why a decode process ends. eof: end of file, or the camera hung up. played_out: a server's stream reached its
    end. needs_cpu: NVDEC cannot decode the stream. no_card: the GPU is unavailable or full."""

    EOF = "eof"
    PLAYED_OUT = "played_out"
    UNAVAILABLE = "unavailable"
    AUTH_FAILED = "auth_failed"
    NOT_ALLOWED = "not_allowed"
    DECODE = "decode"
    INTERNAL = "internal"
    NEEDS_CPU = "needs_cpu"
    NO_CARD = "no_card"


class DecodeMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages below."""


class Start(DecodeMessage, frozen=True, kw_only=True):
    """Parent → child, first and once.

    spec: PrepareSpec.pack() of the network, empty for none. ring_frames, slot_bytes: size of the ring. ring_bytes:
    limit of its use. interval: frames between two inferred frames. policy: of types.DropPolicy. wants_images,
    image_interval_s: as in Want. first_*: where counting continues. max_pixels: larger frames are refused. cut: share
    of the picture (0..1) whose brightness must change at once to begin a segment, 0 for never. decoder: cpu or nvdec.
    device_ring: CUDA IPC handle of a ring with as many slots of row_bytes; empty if rows are in the shared ring.
    begin_after_s: pause before a file in real time begins. allowed_outbound, is_from_api: of
    penstock.outbound.OutboundPolicy.
    """

    uri: str
    spec: bytes
    ring_frames: int
    slot_bytes: int
    ring_bytes: int
    policy: str
    interval: int = 0
    wants_images: bool = False
    image_interval_s: float = 0.0
    is_loop: bool = False
    is_realtime: bool = False
    is_udp: bool = False
    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    record_cache_s: float = 0.0
    max_pixels: int = 0
    first_frame_num: int = 0
    first_pts_s: float = 0.0
    first_segment: int = 0
    cut: float = 0.5
    decoder: str = "cpu"
    device_ring: bytes = b""
    row_bytes: int = 0
    begin_after_s: float = 0.0
    allowed_outbound: tuple[str, ...] = ()
    is_from_api: bool = False

    def __repr__(self) -> str:
        """Omits the address, which may have a password."""
        return f"Start({self.policy}, {self.ring_frames} slots of {self.slot_bytes} bytes)"


class Release(DecodeMessage, frozen=True):
    """Parent → child: these slots of the ring are free."""

    slots: tuple[int, ...]


class Want(DecodeMessage, frozen=True):
    """Parent → child: whether to send full frames from now on. interval_s: at least between two of them."""

    images: bool
    interval_s: float = 0.0


class Hold(DecodeMessage, frozen=True):
    """Parent → child: read nothing while is_held (a paused file)."""

    is_held: bool


class Cut(DecodeMessage, frozen=True):
    """Parent → child: record from before_s before the frame to after_s after it. frame_num: < 0 for the newest."""

    path: str
    before_s: float
    after_s: float
    frame_num: int = -1


class Opened(DecodeMessage, frozen=True, kw_only=True):
    """Child → parent: the source is open, or its resolution, rate or codec changed. fps: of the stream, 0 if unknown.
    frames_total, duration_s: of a file, if known. is_recordable: its packets fit into MP4. decoder: cpu or nvdec."""

    width: int
    height: int
    fps: float
    codec: str
    is_live: bool
    frames_total: int | None = None
    duration_s: float | None = None
    is_recordable: bool = True
    decoder: str = "cpu"


class FrameReady(DecodeMessage, frozen=True, kw_only=True):
    """Child → parent: a frame is in a slot of the ring. The parent owns the slot until it sends Release.

    row_shape: of the network's input, at the slot's start; empty if not inferred. has_image: the source-size picture
    follows at ring.image_offset(bytes of the row in the ring). is_on_device: the row is in this slot of the device
    ring. sample_aspect: width and height of a pixel.
    """

    slot: int
    frame_num: int
    pts_s: float
    captured_at: float
    captured_unix_s: float
    width: int
    height: int
    row_shape: tuple[int, ...]
    has_image: bool
    segment: int
    is_corrupt: bool
    digest: int
    is_on_device: bool = False
    sample_aspect: tuple[int, int] = (1, 1)


class Lost(DecodeMessage, frozen=True):
    """Child → parent: decoded frames that did not go into the ring. reason: of types.DropReason."""

    reason: str
    count: int


class Beat(DecodeMessage, frozen=True):
    """Child → parent, once a second: sums since the start; times in CPU seconds. is_waiting: for its turn at the GPU.
    is_pacing: for the next frame of a file played in real time. Neither counts as silence. sharing: of its NVDEC
    decoder, None on the CPU."""

    decoded: int
    bad_packets: int
    decode_s: float
    prepare_s: float
    is_waiting: bool = False
    is_pacing: bool = False
    sharing: DecoderSharing | None = None


class Recorded(DecodeMessage, frozen=True):
    """Child → parent: a recording ended. error: empty, or why it is missing or short. before_s, after_s: recorded
    around its moment, 0 without a file. is_unwritable: it could not be written."""

    path: str
    error: str
    before_s: float = 0.0
    after_s: float = 0.0
    is_unwritable: bool = False

    @property
    def result(self) -> str:
        """ok, short, or failed without a file."""
        if not self.error:
            return "ok"
        return "short" if self.before_s or self.after_s else "failed"


class Ended(DecodeMessage, frozen=True):
    """Child → parent, last. text: for display, without user and password."""

    reason: EndReason
    text: str


UP = Opened | FrameReady | Lost | Beat | Recorded | Ended
DOWN = Start | Release | Want | Hold | Cut

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(UP).decode
decode_down = msgspec.msgpack.Decoder(DOWN).decode
