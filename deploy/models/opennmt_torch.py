"""OpenNMT's translator as a PyTorch program for a GPU: `python -m deploy.models.opennmt --torch` exports it.

Nothing in it depends on the words: 25 steps of the encoder and 25 of the decoder stand one after the other, so that a
CUDA graph holds a whole batch of sentences. It is written for few kernels a step (three a cell, seven for attention,
generator and choice), and for the widths that tensor cores want: every width is padded with zeros to a multiple of 64,
which changes no answer, since a padded unit's state stays 0. No type and no device stands in the program, so that
`.half()` and `.to("cuda")` are enough to serve it.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from deploy.models.opennmt_weights import BEGIN, BLANK, GATES, UNKNOWN, Cell, FloatArray, Size, Weights

MULTIPLE = 64
FAR = -1e4  # a score that the softmax makes 0 of, in half precision, too
State = tuple[torch.Tensor, torch.Tensor]


class Translator(nn.Module):  # type: ignore[misc]  # torch is not installed where the types are checked
    """Words (N, source_length) int64, padded with BLANK at the end, to the likeliest words (N, target_length) int64."""

    def __init__(self, size: Size, weights: Weights) -> None:
        super().__init__()
        self.size = size
        width = padded(size.width)
        context, state = np.split(weights.attention_out, 2, axis=1)
        vocabulary = padded(
            size.vocabulary
        )  # as many rows as can be chosen: a row that is not there kills a GPU's context
        self.source_words = _parameter(_wide(weights.source_words, (size.vocabulary, width)))
        self.target_words = _parameter(_wide(weights.target_words, (vocabulary, width)))
        self.encoder = nn.ModuleList(_Cell(cell, size.width) for cell in weights.encoder)
        self.decoder = nn.ModuleList(_Cell(cell, size.width) for cell in weights.decoder)
        self.keys = _parameter(_wide(weights.attention_in.T, (width, width)))
        self.context = _parameter(_wide(context, (width, width)))
        self.state = _parameter(_wide(state, (width, width)))
        self.generator = _parameter(_wide(weights.generator, (vocabulary, width)))
        bias = np.full(vocabulary, FAR, np.float32)
        bias[: size.vocabulary] = weights.generator_bias
        self.generator_bias = _parameter(bias)
        self.register_buffer("positions", torch.arange(1, size.source_length + 1)[None])
        self.register_buffer("near", torch.zeros(1, 1))
        self.register_buffer("far", torch.full((1, 1), FAR))
        self.register_buffer("rest", torch.zeros(1, width))
        self.register_buffer("begin", torch.full((1,), BEGIN))

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """A number that is no word's is `<unk>`; a sentence of blanks is one blank."""
        known = (source >= 0) & (source < self.size.vocabulary)
        words = functional.embedding(torch.where(known, source, UNKNOWN), self.source_words)
        length = torch.where(source != BLANK, self.positions, 1).amax(1, keepdim=True)
        memory, states = self._encode(words, length - 1)
        mask = torch.where(self.positions > length, self.far, self.near)[:, :, None]
        return self._decode(memory, mask, states)

    def _encode(self, words: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, list[State]]:
        """The memory (N, S, H) of the last layer, and every layer's state after the sentence's own last word."""
        rest = self.rest.expand(words.shape[0], -1)
        last = last[:, :, None].expand(-1, -1, words.shape[2])
        states = []
        for cell in self.encoder:
            steps = [(rest, rest)]
            for word in words.unbind(1):
                steps.append(cell(word, steps[-1]))
            words, memories = (torch.stack(part, 1) for part in zip(*steps[1:], strict=True))
            states.append((words.gather(1, last).squeeze(1), memories.gather(1, last).squeeze(1)))
        return words, states

    def _decode(self, memory: torch.Tensor, mask: torch.Tensor, states: list[State]) -> torch.Tensor:
        """Attention's matrices are multiplied into the memory once, not into every step's state and context."""
        keys, values = functional.linear(memory, self.keys), functional.linear(memory, self.context)
        fed = self.rest.expand(memory.shape[0], -1)
        word, answer = self.begin.expand(memory.shape[0]), []
        for _ in range(self.size.target_length):
            below = torch.cat([functional.embedding(word, self.target_words), fed], 1)
            for layer, cell in enumerate(self.decoder):
                states[layer] = cell(below, states[layer])
                below = states[layer][0]
            shares = torch.baddbmm(mask, keys, below[:, :, None]).softmax(1)
            own = functional.linear(below, self.state)[:, None, :]
            fed = torch.baddbmm(own, shares.transpose(1, 2), values).squeeze(1).tanh()
            word = functional.linear(fed, self.generator, self.generator_bias).argmax(1)
            answer.append(word)
        return torch.stack(answer, 1)


class _Cell(nn.Module):  # type: ignore[misc]  # as above
    """One step of a layer; on a GPU two matrix products and one kernel."""

    def __init__(self, cell: Cell, width: int) -> None:
        super().__init__()
        self.input = _parameter(_gates(cell.input, width))
        self.state = _parameter(_gates(cell.state, width))
        self.input_bias = _parameter(_gates(cell.input_bias, width))
        self.state_bias = _parameter(_gates(cell.state_bias, width))

    def forward(self, below: torch.Tensor, state: State) -> State:
        cell: State = torch.lstm_cell(below, state, self.input, self.state, self.input_bias, self.state_bias)
        return cell


def export(size: Size, weights: Weights, path: Path, *, max_batch_size: int) -> None:
    """The program as torch.export.save writes it, in float32; its first dimension is free, from 1 to max_batch_size."""
    program = Translator(size, weights).eval()
    example = torch.full((2, size.source_length), UNKNOWN)
    batch = torch.export.Dim("batch", min=1, max=max_batch_size)
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes=({0: batch},))
    torch.export.save(exported, path)


def padded(width: int) -> int:
    """The next multiple of 64."""
    return -(-width // MULTIPLE) * MULTIPLE


def _gates(array: FloatArray, width: int) -> FloatArray:
    """(4 H, …) with every gate, and every block of H inputs, as wide as a padded one."""
    gates = array.reshape(GATES, width, *array.shape[1:])
    blocks = [gates] if array.ndim == 1 else np.split(gates, array.shape[1] // width, axis=2)
    wide = [_wide(block, (GATES, padded(width), padded(width))[: block.ndim]) for block in blocks]
    joined: FloatArray = np.concatenate(wide, axis=-1) if array.ndim > 1 else wide[0]
    return joined.reshape(GATES * padded(width), *joined.shape[2:])


def _wide(array: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Zeros at the end of every dimension."""
    return np.pad(array, [(0, wanted - length) for wanted, length in zip(shape, array.shape, strict=True)])


def _parameter(array: FloatArray) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.ascontiguousarray(array)), requires_grad=False)
