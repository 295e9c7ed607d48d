"""Pictures as the network sees them, and which of them calibrate and which judge."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.batching.merge import merge
from server.core.errors import InferenceError
from server.core.tensor import Array
from server.optimize.errors import OptimizeError
from server.optimize.source import SourceModel
from server.vision.decode import decode
from server.vision.preprocess import Geometry, least_decoded_size, prepare

FEWEST_PICTURES = 8
MOST_CALIBRATING = 64  # ranges change little after some dozens; their arrays stay in memory


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture. array: what one engine call gets, batch axis and all where the model has one."""

    path: Path
    array: Array
    has_batch_axis: bool
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Split:
    """Which pictures calibrate and which are held out to judge. unreadable: left out, a sentence each."""

    calibrating: tuple[Path, ...]
    held_out: tuple[Path, ...]
    unreadable: tuple[str, ...]


def split_pictures(paths: Sequence[Path], source: SourceModel, on_picture: Callable[[], None]) -> Split:
    """Every picture is tried once; of the readable ones every second calibrates, up to MOST_CALIBRATING.

    Those that calibrate lie evenly over the folder, since names that follow each other are often alike. Raises
    OptimizeError where fewer than FEWEST_PICTURES can be read.
    """
    readable: list[Path] = []
    unreadable: list[str] = []
    for path in paths:
        try:
            read_sample(path, source)
            readable.append(path)
        except InferenceError as error:
            unreadable.append(f"{path.name}: {error}")
        except OSError as error:
            unreadable.append(f"{path.name}: {error.strerror}")
        on_picture()
    if len(readable) < FEWEST_PICTURES:
        why = f"; {len(unreadable)} cannot be read, the first is {unreadable[0]}" if unreadable else ""
        raise OptimizeError(
            f"{len(readable)} readable picture{'s' * (len(readable) != 1)} {'are' if len(readable) != 1 else 'is'} too "
            f"few to calibrate and to judge (at least {FEWEST_PICTURES}, better 100){why}"
        )
    step = max(2, -(-len(readable) // MOST_CALIBRATING))
    calibrating = tuple(readable[::step])
    chosen = set(calibrating)
    return Split(calibrating, tuple(path for path in readable if path not in chosen), tuple(unreadable))


def read_sample(path: Path, source: SourceModel) -> Sample:
    """One picture through the gateway's own decoding and preprocessing. Raises OSError and InferenceError."""
    spec = source.card.prepare_spec
    decoded = decode(path.read_bytes(), spec.color, at_least=least_decoded_size(spec))
    array, geometry = prepare(decoded, spec)
    config = source.config
    (call,) = merge([array], declared_shape=config.inputs[0].shape, max_batch_size=config.max_batch_size)
    return Sample(path, call.array, call.has_batch_axis, geometry)


def read_samples(paths: Sequence[Path], source: SourceModel) -> Iterator[Sample]:
    """One after the other: what is held out may be more than memory holds."""
    return (read_sample(path, source) for path in paths)
