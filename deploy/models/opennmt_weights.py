"""OpenNMT's default translator in numbers: its sizes, and seeded random weights that every form of it is made from.

Klein et al., "OpenNMT: Open-Source Toolkit for Neural Machine Translation" (2017), as its own page prints the default
model: two layers of 500 units on each side, word vectors of 500, vocabularies of 50,000 words and four signs, global
("general") attention, input feeding. Gates stand in the order input, forget, candidate, output; a cell has two biases.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
SOURCE, TARGET = "source", "target"  # the input and the output of every form
BLANK, UNKNOWN, BEGIN = 0, 1, 2  # the signs of its vocabularies; 3 ends a sentence
GATES = 4
BOUND, AT_WIDTH = 0.1, 500  # OpenNMT's -param_init: weights are uniform in ± this; more where fewer are added up
EMBEDDING_BOUND = 1.0  # of words and of what chooses them: else every source would be answered alike


@dataclass(frozen=True, slots=True)
class Size:
    """The defaults are OpenNMT's; the lengths, in words, are the project's: 25 are asked for and 25 answered."""

    vocabulary: int = 50_004
    width: int = 500
    layers: int = 2
    source_length: int = 25
    target_length: int = 25

    @property
    def parameter_count(self) -> int:
        """84,822,004 by default, as OpenNMT prints."""
        square, bias = self.width**2, 2 * GATES * self.width
        cells = 2 * self.layers * (2 * GATES * square + bias) + GATES * square
        return cells + 3 * square + 3 * self.vocabulary * self.width + self.vocabulary

    @property
    def multiply_accumulates(self) -> int:
        """Of the matrix products for one sentence of source_length words, attention as both forms compute it.

        Attention's two matrices meet the memory once a sentence, and the state once a word.
        """
        square, cell = self.width**2, 2 * GATES * self.width**2
        encoder = self.source_length * (self.layers * cell + 2 * square)
        attention = square + 2 * self.source_length * self.width
        word = self.layers * cell + GATES * square + attention + self.vocabulary * self.width
        return encoder + self.target_length * word


@dataclass(frozen=True, slots=True)
class Cell:
    """One LSTM layer: input (4 H, in), state (4 H, H), input_bias and state_bias (4 H,)."""

    input: FloatArray
    state: FloatArray
    input_bias: FloatArray
    state_bias: FloatArray


@dataclass(frozen=True, slots=True)
class Weights:
    """source_words, target_words, generator (V, H); attention_in (H, H), attention_out (H, 2 H) for [context, state].

    The decoder's first layer takes [word, attention's last answer], so its input is (4 H, 2 H).
    """

    source_words: FloatArray
    target_words: FloatArray
    encoder: tuple[Cell, ...]
    decoder: tuple[Cell, ...]
    attention_in: FloatArray
    attention_out: FloatArray
    generator: FloatArray
    generator_bias: FloatArray


def draw(size: Size, seed: int) -> Weights:
    """The same seed and size give the same numbers."""
    width = size.width
    random = _Uniform(seed, BOUND * math.sqrt(AT_WIDTH / width))
    return Weights(
        source_words=random((size.vocabulary, width), EMBEDDING_BOUND),
        target_words=random((size.vocabulary, width), EMBEDDING_BOUND),
        encoder=tuple(_cell(random, width, width) for _ in range(size.layers)),
        decoder=tuple(_cell(random, width, width if layer else 2 * width) for layer in range(size.layers)),
        attention_in=random((width, width)),
        attention_out=random((width, 2 * width)),
        generator=random((size.vocabulary, width), EMBEDDING_BOUND),
        generator_bias=random((size.vocabulary,)),
    )


class _Uniform:
    """Numbers in ± the bound."""

    def __init__(self, seed: int, bound: float) -> None:
        self._generator = np.random.default_rng(seed)
        self._bound = bound

    def __call__(self, shape: tuple[int, ...], bound: float | None = None) -> FloatArray:
        """bound: instead of the usual one."""
        return (self._generator.random(shape, np.float32) * 2 - 1) * np.float32(bound or self._bound)


def _cell(random: _Uniform, width: int, inputs: int) -> Cell:
    rows = GATES * width
    return Cell(random((rows, inputs)), random((rows, width)), random((rows,)), random((rows,)))
