"""A PyTorch training loop whose losses depend on the seed alone; prints each in full precision.

Interrupted and restored at any step it must print the losses of an uninterrupted run.
"""

import argparse
import ctypes
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # after the variable that cuBLAS reads


def managed(size):
    """Allocate `size` bytes of managed memory in torch's context; returns what fills it, and checks that it did, on the CPU."""
    driver = ctypes.CDLL("libcuda.so.1")
    memory = ctypes.c_void_p()
    attach_global = 1
    status = driver.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(size), attach_global)
    if status:
        raise SystemExit(f"cuMemAllocManaged: error {status}")

    def fill(value):
        status = driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(value), ctypes.c_size_t(size)) or driver.cuCtxSynchronize()
        if status or ctypes.string_at(memory, size) != bytes([value % 256]) * size:
            raise SystemExit(f"managed memory cannot be filled: error {status}")

    return fill


def main():
    """Train and print `step=N loss=<hex float>` lines, then `done`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--managed-mib", type=int, default=0, help="managed memory to hold and fill at every step")
    args = parser.parse_args()

    torch.manual_seed(20)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(args.width, args.width), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fill = managed(args.managed_mib << 20) if args.managed_mib else lambda value: None
    for step in range(args.steps):
        fill(step)
        batch = torch.randn(256, args.width, device="cuda")
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step={step} loss={loss.item().hex()}", flush=True)
        time.sleep(args.pause)
    print("done", flush=True)


if __name__ == "__main__":
    main()
