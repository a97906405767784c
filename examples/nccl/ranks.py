"""Ranks of NCCL without a framework, which let go of their communicator for a checkpoint and take it up again.

    ranks.py COUNT [--steps N] [--suspend] [--nccl LIBRARY]

The container's init starts a rank for each GPU. SIGUSR1 asks for release, SIGUSR2 for the opposite; init answers as
docs/guide/job-hooks.md has it. The ranks destroy their communicator and make another one. With --suspend they suspend and
resume it, if the library has the functions for that (NCCL 2.29.7 and later). Each rank prints `rank=R step=N sum=S`.
"""

import argparse
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

# Multicast cannot be released. Ranks meet on the loopback interface, which moves with the container.
os.environ.update({"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"})
DIRECTORY = pathlib.Path(os.environ.get("FIRN_JOB_DIRECTORY", "/run/firn"))
ELEMENTS, FLOAT, SUM, SUSPEND_MEM = 1 << 16, 7, 0, 1


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * 128)]


def write(name, data):
    """A file of the job: whole, or not at all."""
    part = DIRECTORY / f".{name}.part"
    part.write_bytes(data)
    part.rename(DIRECTORY / name)


def wait_for(name):
    """The content of a file that another rank writes."""
    while not (DIRECTORY / name).exists():
        time.sleep(0.01)
    return (DIRECTORY / name).read_bytes()


def checked(library, name, *args):
    """Call a function of a library; anything but 0 ends the rank."""
    if code := getattr(library, name)(*args):
        sys.exit(f"{name}: error {code}")


def can_suspend(nccl):
    """Whether the library has both functions."""
    return hasattr(nccl, "ncclCommSuspend") and hasattr(nccl, "ncclCommResume")


class Rank:
    """One rank: its GPU, its buffer, its communicator."""

    def __init__(self, rank, count, library, suspend):
        self.rank, self.count, self.meetings = rank, count, 0
        self.cuda, self.nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(library)
        self.suspend = suspend and can_suspend(self.nccl)
        if suspend and not self.suspend and rank == 0:
            print("this NCCL has no ncclCommSuspend: communicators are destroyed", flush=True)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.buffer, self.stream, self.comm = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
        checked(self.cuda, "cuInit", 0)
        checked(self.cuda, "cuDeviceGet", ctypes.byref(device), rank)
        checked(self.cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        checked(self.cuda, "cuCtxSetCurrent", context)
        checked(self.cuda, "cuMemAlloc_v2", ctypes.byref(self.buffer), ctypes.c_size_t(4 * ELEMENTS))
        checked(self.cuda, "cuStreamCreate", ctypes.byref(self.stream), 0)
        self.begin()

    def begin(self):
        """Make the communicator. Rank 0 makes its id, a new one each time."""
        name, unique = f"id-{self.meetings}", UniqueId()
        self.meetings += 1
        if self.rank == 0:
            checked(self.nccl, "ncclGetUniqueId", ctypes.byref(unique))
            write(name, bytes(unique))
        unique = UniqueId.from_buffer_copy(wait_for(name))
        checked(self.nccl, "ncclCommInitRank", ctypes.byref(self.comm), self.count, unique, self.rank)

    def release(self):
        """Give up all memory that the ranks share."""
        if self.suspend:
            checked(self.nccl, "ncclCommSuspend", self.comm, SUSPEND_MEM)
        else:
            checked(self.nccl, "ncclCommDestroy", self.comm)

    def take_up(self):
        """The opposite."""
        if self.suspend:
            checked(self.nccl, "ncclCommResume", self.comm)
        else:
            self.begin()

    def sum(self, number, flag):
        """The sum over all ranks of a number, with which the buffer is filled, and of a flag at its end."""
        host = (ctypes.c_float * ELEMENTS)(*[number] * (ELEMENTS - 1), flag)
        size, address = ctypes.c_size_t(4 * ELEMENTS), ctypes.c_void_p(self.buffer.value)
        checked(self.cuda, "cuMemcpyHtoD_v2", self.buffer, host, size)
        checked(self.nccl, "ncclAllReduce", address, address, ctypes.c_size_t(ELEMENTS), FLOAT, SUM, self.comm, self.stream)
        checked(self.cuda, "cuStreamSynchronize", self.stream)
        checked(self.cuda, "cuMemcpyDtoH_v2", host, self.buffer, size)
        sums = set(host[: ELEMENTS - 1])
        return sums.pop() if len(sums) == 1 else None, host[ELEMENTS - 1]


def run_rank(args):
    """A rank's loop. All release after the same step: that in which the sum of the flags is not 0."""
    wanted = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: wanted.append(number))
    rank = Rank(args.rank, args.count, args.nccl, args.suspend)
    write(f"rank-{args.rank}", b"works")
    for step in range(args.steps):
        total, asked = rank.sum(step % 1000 + args.rank, float(signal.SIGUSR1 in wanted))
        if total != sum(step % 1000 + other for other in range(args.count)):
            sys.exit(f"rank {args.rank}: the sum of step {step} is {total}")
        print(f"rank={args.rank} step={step} sum={total:g}\n", end="", flush=True)
        if asked:
            rank.release()
            write(f"rank-{args.rank}", b"released")
            while signal.SIGUSR2 not in wanted:
                time.sleep(0.01)
            wanted.clear()
            rank.take_up()
            write(f"rank-{args.rank}", b"works")
        time.sleep(0.1)


def run_init(args):
    """Start the ranks, and pass on to them what is asked, one request after the other."""
    requests = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: requests.append(number))
    ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)]) for rank in range(args.count)]

    def run():
        return all(rank.poll() is None for rank in ranks)

    def are(state):
        return all((DIRECTORY / f"rank-{rank}").exists() and wait_for(f"rank-{rank}") == state for rank in range(args.count))

    released = False
    while run():
        if requests and (released or are(b"works")):
            number = requests.pop(0)
            if released != (number == signal.SIGUSR1):
                released = number == signal.SIGUSR1
                for rank in ranks:
                    rank.send_signal(number)
                while run() and not are(b"released" if released else b"works"):
                    time.sleep(0.01)
            # `failed` may come though nothing was released.
            write("answer", b"ok\n" if run() else b"a rank has ended\n")
        time.sleep(0.02)
    for rank in ranks:
        if any(other.poll() for other in ranks):
            rank.kill()
        rank.wait()
    sys.exit(any(rank.returncode for rank in ranks))


def main():
    """Be init, or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--suspend", action="store_true")
    parser.add_argument("--nccl", default="libnccl.so.2", help="the library (default: what the loader finds)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    run_init(args) if args.rank is None else run_rank(args)


if __name__ == "__main__":
    main()
