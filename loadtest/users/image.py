"""Users of the image endpoint: one encoded picture a request, the next as soon as the answer is there."""

import functools
import itertools
from pathlib import Path

from locust import constant, task
from locust.contrib.fasthttp import FastHttpUser

from loadtest.payloads import Picture, make_pictures, read_pictures

GENERATED_COUNT = 8
SEED = 1


class ImageUser(FastHttpUser):  # type: ignore[misc]  # locust is not type-checked here
    """Posts pictures to /v2/models/{model}/image. An answer without `results` counts as a failure."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Takes the pictures of --images, else generated ones; each user starts at another."""
        options = self.environment.parsed_options
        self.path = f"/v2/models/{options.model}/image"
        pictures = pictures_for_all(options.images)
        start = self.environment.runner.user_count % len(pictures)
        self.pictures = itertools.cycle(pictures[start:] + pictures[:start])

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """One picture, one answer."""
        picture = next(self.pictures)
        headers = {"content-type": picture.media_type}
        with self.client.post(self.path, data=picture.content, headers=headers, catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text or answer.error}")
            elif "results" not in answer.json():
                answer.failure(f"no results in {answer.text[:200]}")


@functools.cache
def pictures_for_all(folder: str) -> list[Picture]:
    """The folder's pictures, or generated ones; made once a process, for every user."""
    return read_pictures(Path(folder)) if folder else make_pictures(GENERATED_COUNT, seed=SEED)
