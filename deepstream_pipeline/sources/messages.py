"""What a source's decode process and its parent tell each other: records in MessagePack, one a SOCK_SEQPACKET message.

The parent sends Start first. Either end's closing of the socket ends the decode process. Times are monotonic seconds,
which the processes of one machine share, unless their name says otherwise.
"""

from enum import StrEnum

import msgspec

MESSAGE_BYTES = 65_536  # the most that one message may have


class EndReason(StrEnum):
    """Why a decode process ends. eof: a file is over, or a camera hung up. played_out: what a server plays came to the
    end that it had given. needs_cpu: the card's video engine does not take it, and a CPU may. no_card: the card itself
    cannot be used at this time, or has no room for one more, which says nothing of the stream."""

    EOF = "eof"
    PLAYED_OUT = "played_out"
    UNAVAILABLE = "unavailable"
    AUTH_FAILED = "auth_failed"
    NOT_ALLOWED = "not_allowed"
    DECODE = "decode"
    INTERNAL = "internal"
    NEEDS_CPU = "needs_cpu"
    NO_CARD = "no_card"


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of those below."""


class Start(Record, frozen=True, kw_only=True):
    """Parent → child, first and once.

    spec: server.vision.spec.PrepareSpec.pack() of the network, empty for none. ring_frames, slot_bytes: of the ring
    whose descriptor came with the process; ring_bytes: how much of it may be used at once. interval: frames between two
    that are inferred. policy: of types.DropPolicy. wants_images: full frames travel, too. first_*: where the counting
    goes on. threads: of the decoder, 0 for its own choice. max_pixels: larger frames are refused. cut: how much
    of a file's picture (0..1) must change its brightness at once for another segment to begin, 0 for never. decoder:
    cpu or nvdec. device_ring: the handle (CUDA IPC) of memory on the GPU with as many slots, of row_bytes each, for
    rows; empty where rows go into the ring. allowed_outbound, is_from_api: of server.core.outbound.Outbound.
    """

    uri: str
    spec: bytes
    ring_frames: int
    slot_bytes: int
    ring_bytes: int
    policy: str
    interval: int = 0
    wants_images: bool = False
    is_loop: bool = False
    is_realtime: bool = False
    is_udp: bool = False
    open_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    record_cache_s: float = 0.0
    threads: int = 0
    max_pixels: int = 0
    first_frame_num: int = 0
    first_pts_s: float = 0.0
    first_segment: int = 0
    cut: float = 0.5
    decoder: str = "cpu"
    device_ring: bytes = b""
    row_bytes: int = 0
    allowed_outbound: tuple[str, ...] = ()
    is_from_api: bool = False

    def __repr__(self) -> str:
        """Without the address, which may hold a password."""
        return f"Start({self.policy}, {self.ring_frames} slots of {self.slot_bytes} bytes)"


class Release(Record, frozen=True):
    """Parent → child: these slots of the ring may be written again."""

    slots: tuple[int, ...]


class Want(Record, frozen=True):
    """Parent → child: from now on full frames travel, or do not."""

    images: bool


class Hold(Record, frozen=True):
    """Parent → child: read nothing more until it is told otherwise (a file that is paused)."""

    is_held: bool


class Cut(Record, frozen=True):
    """Parent → child: begin a recording of the packets from so long before that frame until so long after it, into that
    file. frame_num: negative for the newest packet."""

    path: str
    before_s: float
    after_s: float
    frame_num: int = -1


class Opened(Record, frozen=True, kw_only=True):
    """Child → parent: the source is open. After a change of resolution, rate or codec it is told again.

    fps: as the stream says of itself, 0 where it does not. frames_total, duration_s: of a file, where they are known.
    is_recordable: whether its packets fit into MP4. decoder: cpu or nvdec.
    """

    width: int
    height: int
    fps: float
    codec: str
    is_live: bool
    frames_total: int | None = None
    duration_s: float | None = None
    is_recordable: bool = True
    decoder: str = "cpu"


class FrameReady(Record, frozen=True, kw_only=True):
    """Child → parent: a frame lies in a slot of the ring, which is the parent's until it says Release.

    row_shape: of the network's input, at the slot's begin; empty where the frame is not to be inferred. has_image: the
    picture at the source's size lies behind the row, at ring.image_offset(row bytes), 0 bytes of one on the device.
    is_on_device: the row lies in the device ring's slot of that number. sample_aspect: of a pixel, width and height.
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


class Lost(Record, frozen=True):
    """Child → parent: so many decoded frames were not put into the ring. reason: of types.DropReason."""

    reason: str
    count: int


class Beat(Record, frozen=True):
    """Child → parent, each second: it lives. Sums since the start: frames decoded, packets that could not be, seconds
    of CPU for decoding and for making ready. is_waiting: for its turn at the card; is_pacing: until the next frame of a
    file that is played at its own speed is due. Neither is silence of its source.
    """

    decoded: int
    bad_packets: int
    decode_s: float
    prepare_s: float
    is_waiting: bool = False
    is_pacing: bool = False


class Recorded(Record, frozen=True):
    """Child → parent: that recording is over. error: empty, or why it is missing or short. before_s, after_s: what the
    file has around its moment, both 0 where there is none. is_unwritable: it could not be written."""

    path: str
    error: str
    before_s: float = 0.0
    after_s: float = 0.0
    is_unwritable: bool = False

    @property
    def result(self) -> str:
        """ok, short, or failed where there is no file."""
        if not self.error:
            return "ok"
        return "short" if self.before_s or self.after_s else "failed"


class Ended(Record, frozen=True):
    """Child → parent, last: why it ends. text: for a person, without user and password."""

    reason: EndReason
    text: str


UP = Opened | FrameReady | Lost | Beat | Recorded | Ended
DOWN = Start | Release | Want | Hold | Cut

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(UP).decode
decode_down = msgspec.msgpack.Decoder(DOWN).decode
