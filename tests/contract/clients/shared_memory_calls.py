"""What tritonclient's clients do with regions of system shared memory."""

import base64
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tritonclient.utils import shared_memory

from tests.contract.clients.asking import Asker, Reply, reply

Calls = dict[str, Callable[[Asker], Reply]]
F8 = np.arange(8, dtype=np.float32).reshape(2, 4)
SIZE = F8.nbytes
PAGE = 4096
KEYS = (f"/penstock-clients-{os.getpid()}-{number}" for number in itertools.count())  # Triton keeps a key's old segment


@contextlib.contextmanager
def segment(asker: Asker, size_bytes: int = 2 * SIZE) -> Iterator[tuple[Any, str]]:
    """A segment of this process with eight numbers at its beginning, and its key; all regions are gone afterwards."""
    key = next(KEYS)
    made = shared_memory.create_shared_memory_region("ours", key, size_bytes)
    try:
        shared_memory.set_shared_memory_region(made, [F8])
        yield made, key
    finally:
        asker.unregister_system_shared_memory()
        shared_memory.destroy_shared_memory_region(made)


def in_and_out(asker: Asker) -> Reply:
    """Input and output in one region: what the answer says, and what stands in the memory."""
    with segment(asker) as (memory, key):
        asker.register_system_shared_memory("both", key, 2 * SIZE)
        status = asker.get_system_shared_memory_status("both")
        answer = _infer(asker, "both", "both", output_offset=SIZE)
        written = shared_memory.get_contents_as_numpy(memory, np.float32, [2, 4], offset=SIZE).tolist()
        asker.unregister_system_shared_memory("both")
        return str(status).replace(key, "KEY"), answer, written


def with_offset(asker: Asker) -> Reply:
    """A region that begins within its segment."""
    with segment(asker, 2 * PAGE) as (memory, key):
        shared_memory.set_shared_memory_region(memory, [F8 + 8], offset=PAGE)
        asker.register_system_shared_memory("later", key, SIZE, PAGE)
        answer = _infer(asker, "later", None)
        asker.unregister_system_shared_memory("later")
        return answer


def several(asker: Asker) -> Reply:
    """Registered, listed, unregistered all at once: none is left. The bare Triton begins with the gateway's own."""
    asker.unregister_system_shared_memory()
    with segment(asker) as (_, one), segment(asker) as (_, two):
        asker.register_system_shared_memory("one", one, SIZE)
        asker.register_system_shared_memory("two", two, SIZE)
        before = _names(asker.get_system_shared_memory_status())
        asker.unregister_system_shared_memory()
        return before, _names(asker.get_system_shared_memory_status())


def twice(asker: Asker) -> Reply:
    """A name that is registered already."""
    return _refused(asker, lambda key: asker.register_system_shared_memory("name", key, SIZE))


def no_segment(asker: Asker) -> Reply:
    """A key that no one made."""
    return asker.register_system_shared_memory("name", "/penstock-unknown-key", SIZE)


def too_small_for_the_output(asker: Asker) -> Reply:
    """The output's region holds less than the output."""
    return _refused(asker, lambda _: _infer(asker, "name", "name", output_bytes=4))


def beyond_the_region(asker: Asker) -> Reply:
    """An offset behind the region's end."""
    return _refused(asker, lambda _: _infer(asker, "name", None, input_offset=SIZE))


def other_size(asker: Asker) -> Reply:
    """An input of fewer bytes than its shape."""
    return _refused(asker, lambda _: _infer(asker, "name", None, input_bytes=8))


def _refused(asker: Asker, ask: Callable[[str], Reply]) -> Reply:
    with segment(asker) as (_, key):
        asker.register_system_shared_memory("name", key, SIZE)
        answer = reply(lambda _: ask(key), asker)
        asker.unregister_system_shared_memory("name")
        return answer


def _infer(
    asker: Asker, source: str, sink: str | None, *, input_offset: int = 0, input_bytes: int = SIZE,
    output_offset: int = 0, output_bytes: int = SIZE,
) -> Reply:  # fmt: skip
    x = asker.module.InferInput("x", [2, 4], "FP32")
    x.set_shared_memory(source, input_bytes, offset=input_offset)
    y = asker.output()
    if sink is not None:
        y.set_shared_memory(sink, output_bytes, offset=output_offset)
    return asker.infer("identity_fp32", [x], outputs=[y], is_read=sink is None)


def _names(status: Any) -> list[str]:
    rows = status if isinstance(status, list) else status.regions.values()
    return sorted(row["name"] if isinstance(row, dict) else row.name for row in rows)


CALLS: Calls = {
    "input and output in memory": in_and_out,
    "a region with an offset": with_offset,
    "several regions": several,
    "a region twice": twice,
    "a region without a segment": no_segment,
    "a region larger than its segment": lambda asker: _of_segment(asker, 4 * SIZE, 0),
    "a region behind its segment": lambda asker: _of_segment(asker, SIZE, 1 << 20),
    "a region of nothing": lambda asker: _of_segment(asker, 0, 0),
    "too small for the output": too_small_for_the_output,
    "beyond the region": beyond_the_region,
    "other size": other_size,
    "an unknown region": lambda asker: _infer(asker, "unknown", None),
    "status of an unknown region": lambda asker: asker.get_system_shared_memory_status("unknown"),
    "an unknown region unregistered": lambda asker: asker.unregister_system_shared_memory("unknown"),
    "no region of a GPU": lambda asker: asker.get_cuda_shared_memory_status(),
    "a GPU's region that is none": lambda asker: asker.register_cuda_shared_memory(
        "gpu", base64.b64encode(bytes(64)), 0, 64
    ),
}


def _of_segment(asker: Asker, size_bytes: int, offset: int) -> Reply:
    with segment(asker) as (_, key):
        answer = reply(lambda _: asker.register_system_shared_memory("odd", key, size_bytes, offset), asker)
        asker.unregister_system_shared_memory("odd")
        return answer
