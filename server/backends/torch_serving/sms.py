"""How many of a card's SMs this process may use, and how many there are: MPS can limit a client."""

import ctypes
from typing import Any

import torch

_CORES_OF_AN_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}  # by compute capability
_CORES_OF_OTHERS = 128


def own_and_all(device: Any) -> tuple[int, int]:
    """(those of this process, those of the card); 0 for the second where NVML does not tell, as of a slice by MIG."""
    properties = torch.cuda.get_device_properties(device)
    cores = _cores(f"GPU-{properties.uuid}")
    per_sm = _CORES_OF_AN_SM.get((properties.major, properties.minor), _CORES_OF_OTHERS)
    return int(properties.multi_processor_count), cores // per_sm


def _cores(uuid: str) -> int:
    """Of the whole card, by NVML; 0 where it does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        card, count = ctypes.c_void_p(), ctypes.c_uint()
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(card))
            or nvml.nvmlDeviceGetNumGpuCores(card, ctypes.byref(count))
        )
    except (OSError, AttributeError):  # no driver, or one from before that was told
        return 0
    return 0 if failed else count.value
