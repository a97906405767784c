"""Computes in one kernel for so many seconds at each SIGUSR1, and prints `kernel=N ok` or what the driver made of it."""

import argparse
import signal

import torch


def main():
    """Wait for signals for ever; every kernel after one that failed fails, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    args = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    torch.cuda.init()
    # The fastest clock of an H100 or H200: with another one a kernel takes longer.
    cycles = int(args.seconds * 1.98e9)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    print("ready", flush=True)
    number = 0
    while True:
        signal.sigwait({signal.SIGUSR1})
        number += 1
        try:
            torch.cuda._sleep(cycles)
            torch.cuda.synchronize()
            print(f"kernel={number} ok", flush=True)
        except RuntimeError as error:
            print(f"kernel={number} {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
