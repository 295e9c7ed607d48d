"""Tensors in GPU memory that another program made, such as Triton's: read from DLPack, without a library for it."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

_CAPSULE = b"dltensor"
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}  # DLDataTypeCode → numpy's kind


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DeviceTensor:
    """A tensor of a DLPack capsule, which is kept as long as this object. It has numpy's dtype and shape."""

    def __init__(self, capsule: Any) -> None:
        """Raises ValueError for a type that numpy does not have."""
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = ctypes.cast(get(capsule, _CAPSULE), ctypes.POINTER(_DlTensor)).contents
        kind = _KINDS.get(tensor.dtype.code)
        if kind is None or tensor.dtype.lanes != 1 or tensor.dtype.bits % 8:
            raise ValueError(f"a tensor with DLPack's type {tensor.dtype.code} of {tensor.dtype.bits} bits")
        self._capsule = capsule
        self.dtype = np.dtype(f"{kind}{tensor.dtype.bits // 8}")
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.rank))
        strides = [tensor.strides[axis] for axis in range(tensor.rank)] if tensor.strides else None
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (int(tensor.data or 0) + int(tensor.byte_offset), True),
            "strides": tuple(stride * self.dtype.itemsize for stride in strides) if strides is not None else None,
            "version": 3,
        }


class DeviceRows:
    """Tensors of several requests as one batch. They are copied one after the other into the session's input."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """parts: host or device arrays of the same type and row shape."""
        self.parts = tuple(parts)
        self.dtype = parts[0].dtype
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def stacked(arrays: Sequence[Any]) -> Any:
    """One batch of these arrays: an ndarray, or DeviceRows if any is in GPU memory."""
    if any(hasattr(array, "__cuda_array_interface__") for array in arrays):
        return DeviceRows(arrays)
    return np.concatenate(arrays)
