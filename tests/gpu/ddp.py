"""Data-parallel training of two ranks of NCCL on two GPUs, for ever; rank 0 prints each step.

NCCL chooses its transport, which between GPUs of one machine shares memory by peer-to-peer access. NVLink multicast stays
off: not every machine that lends GPUs allows it.
"""

import os
import subprocess
import sys
import time

RANKS = 2
RENDEZVOUS = "/dev/shm/firn-rendezvous"


def start():
    """Start the ranks; the first that ends, ends all."""
    settings = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    ranks = [
        subprocess.Popen([sys.executable, os.path.abspath(__file__), str(rank)], env={**os.environ, **settings})
        for rank in range(RANKS)
    ]
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.2)
    for rank in ranks:
        rank.kill()
        rank.wait()
    sys.exit(f"the ranks ended: {[rank.returncode for rank in ranks]}")


def train(rank):
    """One rank: `step=N loss=<hex float>` lines from the first."""
    import torch
    import torch.distributed

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{RENDEZVOUS}", rank=rank, world_size=RANKS)
    torch.manual_seed(20)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = 0
    while True:
        batch = torch.randn(64, 512, device="cuda")
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step={step} loss={loss.item().hex()}", flush=True)
        step += 1
        time.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]))
    else:
        start()
