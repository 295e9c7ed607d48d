"""An RTSP server of cameras that misbehave on request. Run under the Python that has gi (Debian's /usr/bin/python3).

    python3 server.py '{"port": 0, "is_digest": false, "mounts": [{"path": "/a", "clips": ["a.units"], "fps": 25}]}'

It says `PORT n` on its output, and then `OK` or `NO text` for each line of its input:

    silence /a    send nothing more; the connection stays      speak /a     send again
    rate /a 0.5   so much of real time, from now on            end /a       end the stream, as a camera that is over
    drop          hang up on every client                      frames /a    how many pictures were sent so far

It ends when its input does. Frames are pushed by the clock, not re-encoded: a stream costs little.
"""

import json
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtsp", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtsp, GstRtspServer  # noqa: E402  # as gi wants it

UNIT = struct.Struct(">IQ")  # bytes, presentation time in µs; as clips.write_units writes them
LAUNCH = (
    "( {source} ! h264parse config-interval=-1 "
    "! rtph264pay name=pay0 pt=96 config-interval=-1 aggregate-mode=zero-latency )"
)
PUSHED = (
    "appsrc name=source is-live=true format=time block=false max-bytes=4000000 "
    "caps=video/x-h264,stream-format=byte-stream,alignment=au"
)
RECORDED = 'filesrc location="{path}" ! qtdemux'


@dataclass
class Mount:
    """A camera. units: its access units and their times in seconds; they are played in turn, again and again.

    first_units: so many are sent and then none, -1 for no end; end_after_s: then the stream ends, 0 for never.
    recording: a file that is played instead of units.
    """

    path: str
    fps: float
    units: list[tuple[bytes, float]]
    rate: float = 1.0
    user: str = ""
    password: str = ""
    first_units: int = -1
    end_after_s: float = 0.0
    is_shared: bool = False
    recording: str = ""
    is_silent: bool = False
    is_over: bool = False
    sent: int = 0
    players: list["Player"] = field(default_factory=list)

    @property
    def role(self) -> str:
        """Of a client that knows its user and password; a GStreamer structure's name, so of letters and digits."""
        return f"user{self.path.encode().hex()}"


class Player:
    """Pushes a mount's units into one media, by the clock."""

    def __init__(self, mount: Mount, source: Any) -> None:
        self._mount, self._source = mount, source
        self._count = 0
        self._began = self._due = time.monotonic()
        self._timer = GLib.timeout_add(0, self._push)

    def stop(self, *_: object) -> None:
        """The media is gone."""
        if self._timer:
            GLib.source_remove(self._timer)
            self._timer = 0
        if self in self._mount.players:
            self._mount.players.remove(self)

    def _push(self) -> bool:
        mount, now = self._mount, time.monotonic()
        self._timer = 0
        if mount.is_over or (mount.end_after_s and now - self._began >= mount.end_after_s):
            self._source.emit("end-of-stream")
            return False
        is_reported = mount.first_units < 0 or self._count < mount.first_units
        if is_reported and not mount.is_silent:
            self._send(mount.units[self._count % len(mount.units)][0])
        self._due = max(self._due + 1.0 / (mount.fps * mount.rate), now - 1.0)
        self._timer = GLib.timeout_add(max(int((self._due - time.monotonic()) * 1000), 0), self._push)
        return False

    def _send(self, unit: bytes) -> None:
        buffer = Gst.Buffer.new_wrapped(unit)
        buffer.pts = buffer.dts = int((self._due - self._began) * Gst.SECOND)
        buffer.duration = int(Gst.SECOND / (self._mount.fps * self._mount.rate))
        self._source.emit("push-buffer", buffer)
        self._count += 1
        self._mount.sent += 1


def units_of(path: str) -> list[tuple[bytes, float]]:
    """The access units that lie in a file."""
    content, at, units = Path(path).read_bytes(), 0, []
    while at < len(content):
        size, pts_us = UNIT.unpack_from(content, at)
        at += UNIT.size
        units.append((content[at : at + size], pts_us / 1e6))
        at += size
    return units


def mount_of(options: dict[str, Any]) -> Mount:
    """A mount as the command line tells it."""
    options = dict(options)
    units = [unit for path in options.pop("clips") for unit in units_of(path)]
    return Mount(units=units, **options)


def add(server: Any, mount: Mount) -> None:
    """Serve the mount."""
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(LAUNCH.format(source=RECORDED.format(path=mount.recording) if mount.recording else PUSHED))
    factory.set_shared(mount.is_shared)
    factory.set_stop_on_disconnect(True)
    factory.set_latency(0)

    def configure(_: object, media: Any) -> None:
        player = Player(mount, media.get_element().get_by_name("source"))
        mount.players.append(player)
        media.connect("unprepared", player.stop)

    if not mount.recording:
        factory.connect("media-configure", configure)
    permissions = GstRtspServer.RTSPPermissions()
    permissions.add_permission_for_role("anonymous", "media.factory.access", True)
    permissions.add_permission_for_role("anonymous", "media.factory.construct", not mount.user)
    if mount.user:
        permissions.add_permission_for_role(mount.role, "media.factory.access", True)
        permissions.add_permission_for_role(mount.role, "media.factory.construct", True)
    factory.set_permissions(permissions)
    server.get_mount_points().add_factory(mount.path, factory)


def keys(mounts: list[Mount], is_digest: bool) -> Any:
    """Who may see what: everybody what has no user."""
    auth = GstRtspServer.RTSPAuth()
    method = GstRtsp.RTSPAuthMethod.DIGEST if is_digest else GstRtsp.RTSPAuthMethod.BASIC
    auth.set_supported_methods(method)
    anonymous = GstRtspServer.RTSPToken()
    anonymous.set_string("media.factory.role", "anonymous")
    auth.set_default_token(anonymous)
    for mount in mounts:
        if mount.user:
            token = GstRtspServer.RTSPToken()
            token.set_string("media.factory.role", mount.role)
            if is_digest:
                auth.add_digest(mount.user, mount.password, token)
            else:
                auth.add_basic(GstRtspServer.RTSPAuth.make_basic(mount.user, mount.password), token)
    return auth


def obey(line: str, mounts: dict[str, Mount], server: Any) -> str:
    """What a line of the input asks for, done."""
    verb, *rest = line.split()
    if verb == "drop":
        server.client_filter(lambda *_: GstRtspServer.RTSPFilterResult.REMOVE)
        return "OK"
    mount = mounts.get(rest[0]) if rest else None
    if mount is None:
        return f"NO no mount in {line!r}"
    verbs: dict[str, Callable[[], None]] = {
        "silence": lambda: setattr(mount, "is_silent", True),
        "speak": lambda: setattr(mount, "is_silent", False),
        "rate": lambda: setattr(mount, "rate", float(rest[1])),
        "end": lambda: setattr(mount, "is_over", True),
    }
    if verb == "frames":
        return f"OK {mount.sent}"
    if verb not in verbs:
        return f"NO {verb!r} is not known"
    verbs[verb]()
    return "OK"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(options: dict[str, Any]) -> None:
    Gst.init(None)
    loop = GLib.MainLoop()
    mounts = {mount.path: mount for mount in map(mount_of, options["mounts"])}
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(str(options.get("port", 0)))
    server.set_auth(keys(list(mounts.values()), options.get("is_digest", False)))
    for mount in mounts.values():
        add(server, mount)
    if not server.attach(None):
        raise SystemExit(f"port {options.get('port')} cannot be listened on")

    def read(channel: Any, _: object) -> bool:
        line = channel.readline()
        if not line:
            loop.quit()
            return False
        say(obey(line, mounts, server))
        return True

    channel = GLib.IOChannel.unix_new(sys.stdin.fileno())
    GLib.io_add_watch(channel, GLib.PRIORITY_DEFAULT, GLib.IOCondition.IN | GLib.IOCondition.HUP, read)
    say(f"PORT {server.get_bound_port()}")
    loop.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
