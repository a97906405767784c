#!/usr/bin/env python3
"""Takes the memory of the first GPU but for some, and all of it once somebody frees some, until it is ended.

Prints `holds MIB` when it got more. What it leaves at first is for the driver, whose checkpoint call fails without any.
"""

import ctypes
import sys
import time

STEPS = (1 << 30, 64 << 20, 2 << 20)
LEFT = 1 << 30


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
    free, total, left = ctypes.c_size_t(), ctypes.c_size_t(), LEFT
    while True:
        before = held
        checked(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        if held and free.value > LEFT + LEFT // 2:
            left = 0
        for step in STEPS:
            while free.value >= left + step:
                if cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(step)):
                    break
                held += step
                checked(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        if held != before:
            print(f"holds {held >> 20}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
