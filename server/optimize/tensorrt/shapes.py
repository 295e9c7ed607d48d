"""The optimisation profile: the batch sizes that a plan takes, from max_batch_size. Pure."""

from dataclasses import dataclass

from server.optimize.errors import OptimizeError
from server.optimize.source import SourceModel
from server.vision.spec import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Shapes of the model's one input, batch axis and all. The kernels are chosen for `best`; all between work.

    The three are the same for a model without batch axis.
    """

    input_name: str
    least: Shape
    best: Shape
    most: Shape

    def __str__(self) -> str:
        return (
            f"{self.input_name} {' '.join('x'.join(map(str, shape)) for shape in (self.least, self.best, self.most))}"
        )


def profile_of(source: SourceModel) -> BatchProfile:
    """One image to max_batch_size, best at max_batch_size: whoever batches fills batches when it matters.

    Raises OptimizeError for inputs of variable size, whose largest nobody told.
    """
    declared, spec = source.config.inputs[0], source.card.prepare_spec
    if not spec.width:
        raise OptimizeError(
            f"model {source.name!r} takes pictures of any size, and a plan needs one: give its input's dims in "
            "config.pbtxt as numbers"
        )
    channels = spec.color.channels
    picture = (channels, spec.height, spec.width)
    if spec.layout is Layout.NHWC:
        picture = (spec.height, spec.width, channels)
    most = source.config.max_batch_size
    if not most:
        shape = (1,) * (len(declared.shape) - len(picture)) + picture
        return BatchProfile(declared.name, shape, shape, shape)
    return BatchProfile(declared.name, (1, *picture), (most, *picture), (most, *picture))


def timed_batches(profile: BatchProfile) -> tuple[int, ...]:
    """1, 8 and the most, as far as the profile goes: what speed is measured at."""
    least, most = profile.least[0], profile.most[0]
    return tuple(sorted({least, min(8, most), most}))
