"""all_reduce by NCCL between the GPUs of one machine: `all_reduce mib=N gbps=X` for each size, printed by rank 0.

The rate is that of the bus: 2 (n - 1) / n times the size, by the time that one takes.
"""

import argparse
import time

import ddp

SIZES = (64, 256)
WARM_UP, ROUNDS = 3, 10


def rate(torch, size, device="cuda", rounds=ROUNDS):
    """GB/s of a sum of `size` MiB in the group that there is: the mean of so many."""
    ranks = torch.distributed.get_world_size()
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    data = torch.ones(size << 18, device=device)
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            finish()
            began = time.monotonic()
        torch.distributed.all_reduce(data)
    finish()
    seconds = (time.monotonic() - began) / rounds
    return 2 * (ranks - 1) / ranks * (size << 20) / seconds / 1e9


def measure(rank, args):
    """One rank."""
    torch = ddp.join(rank, args.ranks)
    for size in SIZES:
        gbps = rate(torch, size)
        if rank == 0:
            print(f"all_reduce mib={size} gbps={gbps:.2f}", flush=True)
    ddp.end(torch)


if __name__ == "__main__":
    ddp.main(__file__, measure, argparse.ArgumentParser(description=__doc__))
