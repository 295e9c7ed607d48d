"""The photo-like JPEGs that GPU benches decode."""

from loadtest.bench.gpu.pictures import PHOTO_SIZES, photos
from penstock.engines.torch_serving.picture_header import PictureFormat
from penstock.vision.decode import read_header


def test_photos_same_seed_are_the_same_and_of_the_stated_sizes() -> None:
    """A seed names the bytes; they are JPEGs of ImageNet's sizes, no two alike, of a photograph's weight."""
    made = photos(2, seed=5)
    assert made == photos(2, seed=5)
    assert made != photos(2, seed=6)
    assert len(set(made)) == len(made)
    for encoded in made:
        header = read_header(encoded)
        assert header.format is PictureFormat.JPEG
        assert (header.width, header.height) in PHOTO_SIZES
        assert 15_000 < len(encoded) < 150_000


def test_photos_of_other_sizes_are_of_those() -> None:
    """A bench may name its own sizes, larger than what they are cut from, too."""
    headers = [read_header(encoded) for encoded in photos(2, sizes={(1280, 720): 1.0})]
    assert [(header.width, header.height) for header in headers] == [(1280, 720)] * 2
