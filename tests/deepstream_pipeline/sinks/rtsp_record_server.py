"""GStreamer's RTSP server, taking what is pushed to it: run by the system's Python, which has its bindings.

rtsp_record_server.py PORT FOLDER [USER PASSWORD]: a stream pushed to /NAME lies as H.264 in FOLDER/NAME.h264.
"""

import sys

import gi  # type: ignore[import-not-found]

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # type: ignore[import-not-found]  # noqa: E402


def main() -> None:
    """Serve until it is killed; says "ready" when it listens."""
    Gst.init(None)
    port, folder, *account = sys.argv[1:]
    server = GstRtspServer.RTSPServer.new()
    server.set_address("127.0.0.1")
    server.set_service(port)
    for name in ("one", "cam0", "cam1"):
        factory = GstRtspServer.RTSPMediaFactory.new()
        factory.set_transport_mode(GstRtspServer.RTSPTransportMode.RECORD)
        factory.set_latency(0)
        factory.set_launch(
            "( rtph264depay name=depay0 ! h264parse config-interval=-1 ! video/x-h264,stream-format=byte-stream ! "
            f"filesink buffer-mode=unbuffered sync=false location={folder}/{name}.h264 )"
        )
        if account:
            allow(factory, "anonymous", may_build=False)
            allow(factory, account[0], may_build=True)
        server.get_mount_points().add_factory(f"/{name}", factory)
    if account:
        auth = GstRtspServer.RTSPAuth.new()
        token = GstRtspServer.RTSPToken()
        token.set_string("media.factory.role", account[0])
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic(*account), token)
        server.set_auth(auth)
    if not server.attach(None):
        raise SystemExit("port is taken")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    GLib.MainLoop().run()


def allow(factory: "GstRtspServer.RTSPMediaFactory", role: str, *, may_build: bool) -> None:
    """What a role may do with a factory."""
    structure = Gst.Structure.new_empty(role)
    structure.set_value("media.factory.access", may_build)
    structure.set_value("media.factory.construct", may_build)
    factory.add_role_from_structure(structure)


main()
