"""The training of examples/pytorch, as it is. Each time that its ranks have made their process group they measure it:

    join=0 mib=256 gbps=290.12          rank 0: the best of some means
    join=0 rank=1 pci=0000:17:00.0      each rank: the address by which it knows its GPU
    facts={"hook": "restored", ...}     rank 0 of a restored container

and at the end rank 0 prints `done`. All arguments are those of the training.
"""

import ctypes
import functools
import itertools
import os

import torch
import torch.distributed as dist

import bandwidth
import firn_job
import train

MIB, ROUNDS = int(os.environ.get("HOOKED_MIB", "256")), 5
joins = itertools.count()
make_group = dist.init_process_group


def print_line(text):
    """In one call: the ranks share their output."""
    os.write(1, f"{text}\n".encode())


def address():
    """The address that the driver reports for this rank's GPU, which is the one that the process has read first."""
    name = ctypes.create_string_buffer(32)
    if train.DEVICE.type != "cuda" or ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(name, len(name), train.DEVICE.index):
        return "none"
    return name.value.decode()


def make_and_measure(*args, **settings):
    """init_process_group, and what the ranks print."""
    make_group(*args, **settings)
    number, rank = next(joins), dist.get_rank()
    best = max(bandwidth.rate(torch, MIB, train.DEVICE.type) for _ in range(ROUNDS))
    if train.DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    print_line(f"join={number} rank={rank} pci={address()}")
    if rank == 0:
        print_line(f"join={number} mib={MIB} gbps={best:.2f}")
        facts = firn_job.DIRECTORY / "restore.json"
        if facts.exists():
            print_line(f"facts={' '.join(facts.read_text().split())}")


# DDP has other buckets in the first step of each wrapper, in which more than two ranks sum in another order. With this
# option it keeps its first ones.
dist.init_process_group = make_and_measure
train.DistributedDataParallel = functools.partial(train.DistributedDataParallel, find_unused_parameters=True)
train.main()
if train.RANK == 0:
    print("done", flush=True)
