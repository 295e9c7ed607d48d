"""Brokers over TLS: a certificate that no one vouches for is refused, one that is trusted is taken."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import BrokerSink, ResultKind
from penstock_video.sinks.mqtt import MqttOptions, mqtt_sink
from penstock_video.sinks.redis_stream import RedisOptions, redis_sink
from penstock_video.sinks.webhook import WebhookOptions, webhook_sink
from tests.auth.authorities import Authority
from tests.deepstream_pipeline.brokers import mqtt_broker, redis_broker
from tests.deepstream_pipeline.sinks.results import result
from tests.support.ports import free_port
from tests.support.waiting import wait_for

Secured = Callable[[Path, Path, Path], AbstractContextManager[Callable[[], BrokerSink]]]


@contextmanager
def secured_mqtt(folder: Path, certificate: Path, key: Path) -> Iterator[Callable[[], BrokerSink]]:
    """mosquitto, whose only port speaks TLS."""
    lines = ("allow_anonymous true", f"certfile {certificate}", f"keyfile {key}")
    with mqtt_broker(folder, *lines) as broker:
        yield lambda: mqtt_sink(MqttOptions("127.0.0.1", broker.port, is_tls=True, what=ResultKind.OBJECTS))


@contextmanager
def secured_redis(folder: Path, certificate: Path, key: Path) -> Iterator[Callable[[], BrokerSink]]:
    """redis-server with a TLS port beside its plain one."""
    port = free_port()
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with redis_broker(folder, "--tls-port", str(port), *files):
        yield lambda: redis_sink(RedisOptions(f"rediss://127.0.0.1:{port}/0", what=ResultKind.OBJECTS))


@contextmanager
def secured_web(folder: Path, certificate: Path, key: Path) -> Iterator[Callable[[], BrokerSink]]:
    """An address of https:// that takes everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up in the handshake is what is tested."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        url = f"https://127.0.0.1:{server.server_address[1]}/hook"
        yield lambda: webhook_sink(WebhookOptions(url, timeout_s=2.0, attempts=2, what=ResultKind.OBJECTS))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.filterwarnings("ignore:unclosed <ssl:ResourceWarning")  # paho drops its socket when a handshake fails
@pytest.mark.parametrize("secured", [secured_mqtt, secured_redis, secured_web])
def test_sink_over_tls_delivers_only_to_whom_it_trusts(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an unknown certificate nothing is sent, and the state says why; with a trusted one everything is."""
    monkeypatch.setattr("penstock_video.sinks.broker.CLOSE_S", 0.5)
    authority = Authority("ours")
    certificate, key = authority.sign(tmp_path, "broker")
    with secured(tmp_path, certificate, key) as make:
        sink = make()
        sink.write(result(0, has_image=False))
        wait_for(lambda: sink.statistics().errors > 0)
        said = sink.statistics()
        assert (said.sent, said.refused, said.depth) == (0, 0, 1)
        assert "certificate" in said.reason.lower()
        with pytest.raises(SinkFailed):
            sink.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file(tmp_path)))
        sink = make()
        sink.write(result(0, has_image=False))
        wait_for(lambda: sink.statistics().sent == 1, what=sink.statistics)
        sink.close()
