"""with_numpy.py LIBRARY: norms numpy's arrays by warpforge, without a copy at the way in or out. See with_numpy.rs."""

import ctypes
import sys

import numpy as np

library = ctypes.CDLL(sys.argv[1])
library.warpforge_normed.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
library.warpforge_normed.restype = ctypes.c_void_p

python = ctypes.pythonapi
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]

# Capsules do not copy their names.
NAME, USED = b"dltensor_versioned", b"used_dltensor_versioned"


class Normed:
    """What `numpy.from_dlpack` takes."""

    def __init__(self, x):
        capsule = x.__dlpack__(max_version=(1, 0))
        pointer = python.PyCapsule_GetPointer(capsule, NAME)
        # Taken: it is released by whoever has the pointer.
        python.PyCapsule_SetName(capsule, USED)
        message = ctypes.create_string_buffer(400)
        self.pointer = library.warpforge_normed(pointer, message, len(message))
        if not self.pointer:
            raise ValueError(message.value.decode())

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        return python.PyCapsule_New(self.pointer, NAME, None)


def normed(x):
    return np.from_dlpack(Normed(x))


def main():
    draw = np.random.default_rng(1)
    for dtype, bound in [(np.float32, 1e-5), (np.float16, 2e-3)]:
        base = draw.standard_normal((10, 32)).astype(dtype)
        for name, x in {
            "whole": base,
            "every second row": base[::2],
            "columns": base[:, 8:24],
            "one row": base[3:4],
            "no rows": base[:0],
        }.items():
            references = sys.getrefcount(base)
            wide = x.astype(np.float64)
            wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
            got = normed(x)
            assert got.dtype == dtype and got.shape == x.shape, (name, got.dtype, got.shape)
            error = np.abs(got - wanted).max(initial=0.0)
            assert error <= bound * 4, (name, error)
            # It was given back, and so is the result.
            assert sys.getrefcount(base) == references, name
            del got
    for x, part in [
        (base[::-1], "stride of -32 in axis 0"),
        (np.ones((2, 2)), "type 2 with 64 bits"),
        (np.ones(3, np.float32), "a matrix"),
        (np.ones((2, 2), np.complex64), "type 5 with 64 bits"),
        (np.frombuffer(bytearray(33), np.int8)[1:].view(np.float32).reshape(2, 4), "no multiple of that"),
    ]:
        try:
            normed(x)
        except ValueError as error:
            assert part in str(error), error
        else:
            raise AssertionError(f"taken: {part}")
    print("numpy", np.__version__, "agrees")


main()
