"""Data-parallel training, by DDP or FSDP, that can be checkpointed with NCCL's own choice of transport.

    torchrun --nproc-per-node 2 train.py --steps 200 [--fsdp]
"""

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import firn_job

RANK, COUNT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def network():
    """The same in every rank."""
    torch.manual_seed(20)
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).to(DEVICE)


def adam(model):
    """The optimizer."""
    return torch.optim.AdamW(model.parameters(), 1e-3)


class Ddp:
    """DDP holds its group, the parameters and the optimizer do not: the model is wrapped again."""

    def __init__(self):
        self.inner = network()
        self.optimizer = adam(self.inner)

    def attach(self):
        self.model = DistributedDataParallel(self.inner, device_ids=[DEVICE.index] if DEVICE.type == "cuda" else None)

    def detach(self):
        # Its reducer leaves the parameters' hooks with it.
        del self.model


class Fsdp:
    """Parameters of fully_shard belong to a mesh of groups: each rank keeps its shards, and a new model takes them."""

    def __init__(self):
        self.shards = None

    def attach(self):
        self.model = network()
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = adam(self.model)
        if self.shards:
            for parameter, (shard, state) in zip(self.model.parameters(), self.shards):
                parameter.to_local().detach().copy_(shard)
                self.optimizer.state[parameter] = {
                    name: DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False,
                                             shape=parameter.shape, stride=parameter.stride())
                    if is_shard else value
                    for name, (is_shard, value) in state.items()
                }

    def detach(self):
        def local(value):
            return (True, value.to_local()) if isinstance(value, DTensor) else (False, value)

        # The generators stay as they are; gradients are not kept between steps.
        self.shards = [
            (parameter.to_local().detach().clone(), {name: local(value) for name, value in self.optimizer.state[parameter].items()})
            for parameter in self.model.parameters()
        ]
        del self.model, self.optimizer


def main():
    """Train and print `step=N loss=<hex float>`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    trained = Fsdp() if args.fsdp else Ddp()

    def join(meeting):
        generator = torch.get_rng_state()
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", rank=RANK, world_size=COUNT,
                                init_method=f"file://{meeting}" if meeting else "env://")
        trained.attach()
        torch.set_rng_state(generator)

    def leave():
        trained.detach()
        dist.destroy_process_group()

    def agree(number):
        largest = torch.tensor([number], device=DEVICE)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    ranks = firn_job.Ranks(RANK, COUNT, join, leave)
    data = torch.Generator().manual_seed(21 + RANK)
    for step in range(args.steps):
        ranks.step(agree)
        batch = torch.randn(64, 512, generator=data).to(DEVICE)
        loss = ((trained.model(batch) - batch) ** 2).mean()
        trained.optimizer.zero_grad()
        loss.backward()
        trained.optimizer.step()
        if RANK == 0:
            print(f"step={step} loss={loss.item().hex()}", flush=True)
        time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
