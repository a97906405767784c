"""Data-parallel training with a rank of NCCL for each GPU; rank 0 prints each step, and `done` at the end.

NCCL chooses its transport, unless the environment does; between GPUs of one machine its own choice shares memory by
peer-to-peer access. NVLink multicast stays off: not every machine that lends GPUs allows it. The losses depend on the seed
and the number of ranks alone: an interrupted run must print those of an uninterrupted one.
"""

import argparse
import os
import subprocess
import sys
import time

RENDEZVOUS = "/dev/shm/firn-rendezvous"
SETTINGS = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def start(program, arguments, ranks):
    """Start the ranks; the first that fails ends all."""
    started = [
        subprocess.Popen([sys.executable, os.path.abspath(program), *arguments, "--rank", str(rank)], env={**os.environ, **SETTINGS})
        for rank in range(ranks)
    ]
    while any(rank.poll() is None for rank in started) and not any(rank.poll() for rank in started):
        time.sleep(0.2)
    for rank in started:
        rank.kill()
        rank.wait()
    if any(rank.returncode for rank in started):
        sys.exit(f"the ranks ended: {[rank.returncode for rank in started]}")


def join(rank, ranks):
    """Become a rank of the job; returns torch. The ranks meet over TCP where an address is set, else by a file."""
    import torch
    import torch.distributed

    torch.cuda.set_device(rank)
    address = os.environ.get("MASTER_ADDR")
    meeting = f"tcp://{address}:{os.environ.get('MASTER_PORT', '29500')}" if address else f"file://{RENDEZVOUS}"
    torch.distributed.init_process_group("nccl", init_method=meeting, rank=rank, world_size=ranks)
    return torch


def end(torch):
    """End the rank at once, when all have come so far: to take NCCL down is not what is tried here."""
    torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    sys.stdout.flush()
    # Another rank may still wait for what this one sends over a socket.
    time.sleep(3)
    os._exit(0)


def train(rank, args):
    """One rank: `step=N loss=<hex float>` lines from the first."""
    torch = join(rank, args.ranks)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(20)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    # Every rank has data of its own.
    torch.manual_seed(21 + rank)
    step = 0
    while step < args.steps or not args.steps:
        batch = torch.randn(64, 512, device="cuda")
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step={step} loss={loss.item().hex()}", flush=True)
        step += 1
        time.sleep((args.pause_ms + (args.straggle_ms if rank == 0 else 0)) / 1000)
    if rank == 0:
        print("done", flush=True)
    end(torch)


def main(program, work, parser):
    """Start the ranks, or be one of them."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="0: for ever")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pause-ms", type=float, default=100, help="sleep of every rank after a step")
    parser.add_argument("--straggle-ms", type=float, default=0, help="sleep of rank 0 in addition: the others wait for it on their GPUs")
    args = parser.parse_args()
    if args.rank is None:
        start(program, sys.argv[1:], args.ranks)
    else:
        work(args.rank, args)


if __name__ == "__main__":
    main(__file__, train, argparse.ArgumentParser(description=__doc__))
