"""A tensor over raw addresses of a device, by a DLPack capsule made here.

DLPack is the one way into torch that does not ask the device about the address, so memory may be missing
under a part of the range or under all of it.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import torch

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # kDLCPU, kDLCUDA of dlpack.h
_UINT = 1  # kDLUInt
_NAME = b"dltensor"  # the capsule refers to these bytes


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # NULL: contiguous
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Held(NamedTuple):
    """What must live as long as a storage."""

    managed: _Managed
    shape: ctypes.Array[ctypes.c_int64]
    owner: object


_held: dict[int, _Held] = {}  # by the number that is the struct's context
_numbers = itertools.count(1)


def _forget(address: int, managed: type[_Managed] = _Managed, held: dict[int, _Held] = _held) -> None:
    """The storage is gone. Called from any thread, and late at exit: so nothing global is looked up."""
    held.pop(managed.from_address(address).context, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_DELETER))  # tensors may outlive this module at exit


def window_tensor(address: int, size: int, device: torch.device, owner: object) -> torch.Tensor:
    """A uint8 tensor [size] over `address`; its storage is not ours to free and keeps `owner` alive."""
    if device.type not in _DEVICE_TYPES:
        raise ValueError(f"device={device}: must be one of {', '.join(_DEVICE_TYPES)}")
    number = next(_numbers)
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(_DEVICE_TYPES[device.type], device.index or 0)
    managed.tensor.dimensions = 1
    managed.tensor.type = _Type(_UINT, 8, 1)
    managed.tensor.shape = shape
    managed.context = number
    managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    _held[number] = _Held(managed, shape, owner)
    try:
        return torch.utils.dlpack.from_dlpack(make(ctypes.addressof(managed), _NAME, None))
    except BaseException:
        del _held[number]  # torch has not taken it over
        raise
