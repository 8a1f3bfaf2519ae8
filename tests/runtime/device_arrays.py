"""Arrays that give their memory through DLPack, of any device, made by hand as a C library would."""

import ctypes

from aotc.runtime.dlpack import _Managed, _Versioned

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DeviceArray:
    """`address` in memory of a device. `streams` has what consumers passed."""

    def __init__(self, address, shape, code=2, bits=32, lanes=1, device=(2, 0), strides=None, offset=0, version=(1, 0), flags=0):  # noqa: PLR0913, E501
        self.streams, self.device, self.version = [], device, version
        self._sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
        self._struct = managed = (_Managed if version is None else _Versioned)()
        if version is not None:
            managed.major, managed.minor, managed.flags = *version, flags
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.device_id, tensor.byte_offset = address, *device, offset
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(shape), code, bits, lanes
        tensor.shape = ctypes.cast(self._sizes, ctypes.POINTER(ctypes.c_int64))
        if self._strides is not None:
            tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.version is None and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.streams.append(options.get("stream"))
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return _new(ctypes.addressof(self._struct), name, None)
