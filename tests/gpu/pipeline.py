"""A training whose model has one half on each of two GPUs; prints each loss in full precision, and `done` at the end.

Activations and gradients go from GPU to GPU: `--through peer` lets PyTorch copy them, which opens the memory of each GPU to
the other, `--through host` copies them by the host's memory. The losses are the same.
"""

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # after the variable that cuBLAS reads

WIDTH = 1024
GIB = 1 << 28  # of float32


def half(device):
    """Four layers on one GPU."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return torch.nn.Sequential(*layers).to(device)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--through", choices=["peer", "host"], default="peer")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(30)
    first, second = half("cuda:0"), half("cuda:1")
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-4)
    # As large caches and embeddings are.
    large = [torch.full((GIB,), float(number + 3), device=f"cuda:{number}") for number in range(2)]
    for step in range(args.steps):
        hidden = first(torch.randn(64, WIDTH, device="cuda:0"))
        hidden = hidden.to("cuda:1") if args.through == "peer" else hidden.cpu().to("cuda:1")
        loss = (second(hidden) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step={step} loss={loss.item().hex()}", flush=True)
        time.sleep(0.2)
    if [tensor.unique().tolist() for tensor in large] != [[3.0], [4.0]]:
        raise SystemExit("the large tensors have changed")
    print("done", flush=True)


if __name__ == "__main__":
    main()
