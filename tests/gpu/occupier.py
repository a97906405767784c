#!/usr/bin/env python3
"""Takes all free memory of the first GPU and whatever becomes free, until it is ended; prints `holds MIB` when it got more."""

import ctypes
import sys
import time

STEPS = (1 << 30, 64 << 20, 2 << 20)


def checked(code):
    """Ends the program when a call of the driver failed."""
    if code:
        sys.exit(f"CUDA error {code}")


def main():
    """Allocate for ever."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, held = ctypes.c_int(), ctypes.c_void_p(), 0
    checked(cuda.cuInit(0))
    checked(cuda.cuDeviceGet(ctypes.byref(device), 0))
    checked(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    checked(cuda.cuCtxSetCurrent(context))
    while True:
        before = held
        for step in STEPS:
            while cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(step)) == 0:
                held += step
        if held != before:
            print(f"holds {held >> 20}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
