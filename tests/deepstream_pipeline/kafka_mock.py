"""librdkafka's mock cluster of one broker, as a process of its own: it can be stopped, and its broker taken down.

Prints its address, then obeys lines of standard input: "down" (connections are cut and refused) and "up"; what was
written stays. The library is the one in confluent-kafka's wheel, whose Python half has no words for down and up.
"""

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path


def library() -> Path | None:
    """The wheel's librdkafka; None if it is linked otherwise."""
    spec = find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent.parent / "confluent_kafka.libs").glob("librdkafka*"), None)


def main(path: str) -> None:
    """Runs until standard input ends."""
    kafka = ctypes.CDLL(path)
    kafka.rd_kafka_new.restype = kafka.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    kafka.rd_kafka_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    kafka.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
    kafka.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    kafka.rd_kafka_mock_cluster_bootstraps.argtypes = [ctypes.c_void_p]
    orders = {"down": kafka.rd_kafka_mock_broker_set_down, "up": kafka.rd_kafka_mock_broker_set_up}
    for order in orders.values():
        order.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    cluster = kafka.rd_kafka_mock_cluster_new(kafka.rd_kafka_new(0, None, None, 0), 1)
    sys.stdout.write(kafka.rd_kafka_mock_cluster_bootstraps(cluster).decode() + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        orders[line.strip()](cluster, 1)


if __name__ == "__main__":
    main(sys.argv[1])
