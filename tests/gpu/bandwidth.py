"""all_reduce by NCCL between the GPUs of one machine: `all_reduce mib=N gbps=X` for each size, printed by rank 0.

The rate is that of the bus: 2 (n - 1) / n times the size, by the time that one takes.
"""

import argparse
import time

import ddp

SIZES = (64, 256)
WARM_UP, ROUNDS = 3, 10


def measure(rank, args):
    """One rank."""
    torch = ddp.join(rank, args.ranks)
    for size in SIZES:
        data = torch.ones(size << 18, device="cuda")
        for number in range(WARM_UP + ROUNDS):
            if number == WARM_UP:
                torch.cuda.synchronize()
                began = time.monotonic()
            torch.distributed.all_reduce(data)
        torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / ROUNDS
        if rank == 0:
            print(f"all_reduce mib={size} gbps={2 * (args.ranks - 1) / args.ranks * (size << 20) / seconds / 1e9:.2f}", flush=True)
    ddp.end(torch)


if __name__ == "__main__":
    ddp.main(__file__, measure, argparse.ArgumentParser(description=__doc__))
