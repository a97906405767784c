"""A PyTorch training loop whose losses depend on the seed alone; prints each in full precision.

Interrupted and restored at any step it must print the losses of an uninterrupted run.
"""

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # after the variable that cuBLAS reads


def main():
    """Train and print `step=N loss=<hex float>` lines, then `done`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()

    torch.manual_seed(20)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(args.width, args.width), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(args.steps):
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
