"""Bytes and JSON damaged at random, and the account of a long run of such cases."""

import json
import random
import sys
import time

import psutil

MIB = 1 << 20
REPORT_EVERY_S = 15.0
ODD_VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40),
    *(0.0, -0.0, 1e308, 5e-324, float("inf"), float("nan"), "", "x", "\0", "\ud800", "\u00e9" * 300, "FP32", "BYTES"),
    *(
        [],
        {},
        [[]],
        [None],
        [-1],
        [0],
        [2**31, 2**31],
        [1] * 65,
        {"a": {}},
        [[[[[[[[1]]]]]]]],
        "../x",
        "/",
        "file:../a",
    ),
)
ODD_NAMES = (
    "",
    "name",
    "inputs",
    "parameters",
    "binary_data_size",
    "shared_memory_region",
    "file:../a",
    "timeout",
    "id",
)


def damaged(seed: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, flipped by a bit, cut out, doubled or put in."""
    data = bytearray(seed)
    for _ in range(_few(chance)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.randint(1, 16)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 64)]
            case 3 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case _:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(data)


def damaged_json(seed: bytes, chance: random.Random) -> bytes:
    """A JSON text that is still one, with values replaced by odd ones, members dropped, doubled or renamed."""
    value = json.loads(seed)
    for _ in range(_few(chance)):
        value = _damaged_value(value, chance)
    return json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")


def _few(chance: random.Random) -> int:
    """One mostly, eight at most: what is damaged much is refused at its first byte."""
    return min(chance.choice((1, 1, 1, 2, 3)), chance.randint(1, 8)) if chance.random() < 0.9 else 8


def _damaged_value(value: object, chance: random.Random) -> object:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(ODD_VALUES)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        changed = [*value]
        if chance.random() < 0.2:
            return changed[:at] + changed[at + 1 :] if chance.random() < 0.5 else [*changed, changed[at]]
        changed[at] = _damaged_value(changed[at], chance)
        return changed
    name = chance.choice(list(value))
    rest = {key: item for key, item in value.items() if key != name}
    match chance.randrange(6):
        case 0:
            return rest
        case 1:
            return rest | {chance.choice(list(ODD_NAMES)): value[name]}
        case _:
            return value | {name: _damaged_value(value[name], chance)}


class Run:
    """So many cases of one kind from a random seed, which is printed; progress every few seconds."""

    def __init__(self, name: str, cases: int) -> None:
        self.name = name
        self.cases = cases
        self.seed = random.SystemRandom().randrange(1 << 32)
        self.chance = random.Random(self.seed)
        self.done = 0
        self._started = self._reported = time.monotonic()
        self._rss = psutil.Process().memory_info().rss

    def __str__(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self.name}: {self.done} of {self.cases} cases in {seconds:.0f} s, seed {self.seed}"

    def step(self) -> None:
        """One case more."""
        self.done += 1
        if time.monotonic() - self._reported > REPORT_EVERY_S:
            self._reported = time.monotonic()
            sys.stderr.write(f"{self}\n")  # a long run shows that it moves

    def grown_bytes(self) -> int:
        """By how much this process's memory is more than at the start."""
        return int(psutil.Process().memory_info().rss - self._rss)
