"""Ray Serve, as its documentation says: python ray_server.py PORT WORKERS FOLDER.

* docs.ray.io/en/latest/serve/advanced-guides/dyn-req-batch.html: @serve.batch with max_batch_size and
  batch_wait_timeout_s.
* docs.ray.io/en/latest/serve/advanced-guides/performance.html: a core a replica (ray_actor_options).
* docs.ray.io/en/master/cluster/kubernetes/user-guides/kuberay-serve-high-throughput.html: RAY_SERVE_ENABLE_HA_PROXY
  and RAY_SERVE_THROUGHPUT_OPTIMIZED, which the starter sets.
Measured on two cores, three rounds: with batches of 4 within 5 ms 142 pictures a second (87-151) at 13.4 ms of CPU,
without 109 (94-139) at 13.8 ms; without the two variables 69 (49-98) at 19 ms, on a busy machine.
The object store is as small as Ray allows, because nothing large goes through it; Ray's own default (a third of
/dev/shm or more) would only be reserved.
"""
# mypy: disable-error-code="attr-defined,import-not-found,misc,no-any-unimported,untyped-decorator"
# Runs in Ray's own environment, where `detector` lies on the path.

import sys

import ray
from detector import Answer, Detector, read_card
from ray import serve
from starlette.requests import Request

MAX_BATCH_SIZE, BATCH_WAIT_S = 4, 0.005
OBJECT_STORE_BYTES = 80 * 1024 * 1024


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
class DetectorReplica:
    """A picture to boxes."""

    def __init__(self) -> None:
        self._detector = Detector(read_card())

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT_S)
    async def detect_many(self, jpegs: list[bytes]) -> list[Answer]:
        """One run of the network for all."""
        answers: list[Answer] = self._detector.detect_many(jpegs)
        return answers

    async def __call__(self, request: Request) -> Answer:
        """The boxes of a picture, which is the body."""
        answer: Answer = await self.detect_many(await request.body())
        return answer


if __name__ == "__main__":
    port, workers, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ray.init(
        num_cpus=workers,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(DetectorReplica.options(num_replicas=workers).bind(), route_prefix="/detect", blocking=True)
