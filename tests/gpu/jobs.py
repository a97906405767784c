"""Jobs as people write them, each with another library or another use of one: `jobs.py KIND` prints `step=N loss=<hex float>`
from the first step on, then `done`.

The losses depend on the seed alone: a job that is interrupted and restored at any step must print those of an uninterrupted
one. With `--device cpu` those that need no GPU run without one, for a trial of the script.
"""

import argparse
import functools
import os
import socket
import socketserver
import sys
import threading
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# JAX takes three quarters of the GPU's memory otherwise, and chooses its kernels by measuring them.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(offline, "1")

BATCH, WIDTH = 64, 512
# Where a generation server listens, and the seed and length of what its own client asks for.
PORT, OWN_SEED = 7002, 1


def report(args, step, loss):
    """Print a step, and wait."""
    print(f"step={step} loss={float(loss).hex()}", flush=True)
    time.sleep(args.pause)


def torch_with_seed():
    """PyTorch, whose results depend on the seed alone."""
    import torch

    torch.manual_seed(20)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    return torch


def network(torch):
    """A network that needs a generator on the device, for its dropout."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4 * WIDTH, WIDTH))


def rows(torch, args):
    """As many rows as the steps need."""
    return torch.utils.data.TensorDataset(torch.randn(args.steps * BATCH, WIDTH, generator=torch.Generator().manual_seed(3)))


def optimize(optimizer, loss):
    """A step of a plain loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def lightning(args):
    """PyTorch Lightning's trainer, in mixed precision."""
    torch = torch_with_seed()
    import pytorch_lightning
    from pytorch_lightning.plugins.environments import LightningEnvironment

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network(torch)

        def training_step(self, batch, _):
            return ((self.network(batch[0]) - batch[0]) ** 2).mean()

        def on_train_batch_end(self, outputs, batch, index):
            report(args, index, outputs["loss"])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    pytorch_lightning.seed_everything(20)
    # Named, because a trainer that looks for its environment starts MPI where mpi4py is installed.
    trainer = pytorch_lightning.Trainer(
        plugins=[LightningEnvironment()],
        accelerator="gpu" if args.device == "cuda" else "cpu", devices=1, max_steps=args.steps, precision="bf16-mixed", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(torch, args), BATCH))


def accelerate(args):
    """Hugging Face's accelerate, with gradients of two batches accumulated for a step of the optimizer."""
    torch = torch_with_seed()
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=args.device == "cpu")
    model = network(torch)
    loader = torch.utils.data.DataLoader(rows(torch, args), BATCH, shuffle=True, pin_memory=args.device == "cuda")
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
    for step, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = ((model(batch) - batch) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        report(args, step, accelerator.gather(loss.detach()).mean())


def language_model(torch, args, layers):
    """A model of GPT-2's make with random weights, its size that of the smallest with 12 layers."""
    import transformers

    # Its attention's own backward pass is not deterministic.
    config = transformers.GPT2Config(n_layer=layers, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config).to(args.device)


def gpt2(args):
    """A training of 124 million parameters by transformers, in bf16 autocast."""
    torch = torch_with_seed()
    model = language_model(torch, args, args.layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for step in range(args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (4, 128), device=args.device)
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        optimize(optimizer, loss)
        report(args, step, loss.item())


def amp(args):
    """Convolutions in half precision with a GradScaler; the state is saved to a file every eight steps and read four later."""
    torch = torch_with_seed()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Conv2d(64, 3, 3, padding=1)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(args.device)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    for step in range(args.steps):
        batch = torch.randn(32, 3, 64, 64, device=args.device)
        with torch.autocast(args.device, torch.float16):
            loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, "/tmp/state.pt")
        elif step % 8 == 4:
            for name, state in torch.load("/tmp/state.pt").items():
                parts[name].load_state_dict(state)
        report(args, step, loss.item())


def draw(index):
    """A batch that depends on its index alone, in shared memory."""
    import torch

    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(index))


def tensors(args):
    """A pool of torch.multiprocessing, which sends tensors in shared memory, forked from a process with CUDA."""
    torch = torch_with_seed()
    model = network(torch).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with torch.multiprocessing.get_context("fork").Pool(3, functools.partial(torch.set_num_threads, 1)) as pool:
        for step, batch in enumerate(pool.imap(draw, range(args.steps))):
            batch = batch.to(args.device)
            loss = ((model(batch) - batch) ** 2).mean()
            optimize(optimizer, loss)
            report(args, step, loss.item())


def prefetch(args):
    """Batches that a side stream copies from pinned memory one step ahead, and losses that another copies back."""
    torch = torch_with_seed()
    model = network(torch).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    inwards, outwards = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    host = [torch.empty(BATCH, WIDTH, pin_memory=True) for _ in range(2)]
    device = [torch.empty(BATCH, WIDTH, device="cuda") for _ in range(2)]
    arrived, used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
    losses = torch.empty(args.steps, pin_memory=True)

    def fetch(step):
        slot = step % 2
        arrived[slot].synchronize()
        host[slot].copy_(draw(step))
        with torch.cuda.stream(inwards):
            inwards.wait_event(used[slot])
            device[slot].copy_(host[slot], non_blocking=True)
            arrived[slot].record()

    fetch(0)
    for step in range(args.steps):
        slot = step % 2
        fetch(step + 1)
        torch.cuda.current_stream().wait_event(arrived[slot])
        loss = ((model(device[slot]) - device[slot]) ** 2).mean()
        optimize(optimizer, loss)
        used[slot].record()
        with torch.cuda.stream(outwards):
            outwards.wait_event(used[slot])
            losses[step].copy_(loss.detach(), non_blocking=True)
        outwards.synchronize()
        report(args, step, losses[step].item())


def triton_kernels(args):
    """A regression whose gradient and momentum are computed by kernels of Triton."""
    torch = torch_with_seed()
    global triton, language  # where Triton looks for what its kernels name
    import triton
    import triton.language as language

    @triton.jit
    def update(weights, velocity, inputs, targets, losses, rate, size: language.constexpr):
        block = language.program_id(0)
        at = block * size + language.arange(0, size)
        weight, value = language.load(weights + at), language.load(inputs + at)
        error = weight * value - language.load(targets + at)
        speed = 0.9 * language.load(velocity + at) - rate * error * value
        language.store(velocity + at, speed)
        language.store(weights + at, weight + speed)
        language.store(losses + block, language.sum(error * error, axis=0))

    blocks, size = 1 << 12, 1 << 10
    weights, velocity = (torch.zeros(blocks * size, device="cuda") for _ in range(2))
    wanted = torch.randn(blocks * size, device="cuda")
    losses = torch.empty(blocks, device="cuda")
    for step in range(args.steps):
        inputs = torch.randn(blocks * size, device="cuda")
        update[(blocks,)](weights, velocity, inputs, inputs * wanted, losses, 1e-2, size=size)
        report(args, step, losses.mean().item())


def jax_training(args):
    """A training by JAX: a compiled step with gradients and Adam."""
    import jax
    from jax import numpy

    def predict(weights, batch):
        return numpy.tanh(batch @ weights[0]) @ weights[1]

    def loss_of(weights, batch):
        return ((predict(weights, batch) - batch) ** 2).mean()

    @jax.jit
    def advance(state, key):
        weights, mean, square = state
        key, drawn = jax.random.split(key)
        loss, gradient = jax.value_and_grad(loss_of)(weights, jax.random.normal(drawn, (BATCH, WIDTH)))
        mean = [0.9 * old + 0.1 * new for old, new in zip(mean, gradient)]
        square = [0.99 * old + 0.01 * new**2 for old, new in zip(square, gradient)]
        weights = [old - 1e-3 * first / (numpy.sqrt(second) + 1e-8) for old, first, second in zip(weights, mean, square)]
        return (weights, mean, square), key, loss

    key = jax.random.PRNGKey(20)
    weights = [0.02 * jax.random.normal(key, shape) for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))]
    zeros = [numpy.zeros_like(weight) for weight in weights]
    state = (weights, zeros, zeros)
    for step in range(args.steps):
        state, key, loss = advance(state, key)
        report(args, step, loss)


def cupy_regression(args):
    """A regression by CuPy: cuBLAS, cuRAND, a kernel compiled at run time, two streams and the memory pool."""
    import cupy

    squash = cupy.RawKernel(
        'extern "C" __global__ void squash(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] = tanhf(x[i]); }',
        "squash")
    random = cupy.random.RandomState(20)
    side = cupy.cuda.Stream(non_blocking=True)
    wanted = random.standard_normal((WIDTH, WIDTH), dtype=cupy.float32) / WIDTH**0.5
    weights = cupy.zeros_like(wanted)
    for step in range(args.steps):
        batch = random.standard_normal((BATCH, WIDTH), dtype=cupy.float32)
        drawn = cupy.cuda.get_current_stream().record()
        with side:
            side.wait_event(drawn)
            squash((BATCH * WIDTH // 256,), (256,), (batch, cupy.int32(BATCH * WIDTH)))
            targets = batch @ wanted
        cupy.cuda.get_current_stream().wait_event(side.record())
        error = batch @ weights - targets
        weights -= 0.5 / BATCH * (batch.T @ error)
        report(args, step, float((error**2).mean().get()))


class Generator:
    """Generates tokens with a KV cache for each connection: `SEED COUNT` is answered with a line for each token.

    The process prints the port of every peer that is gone before it had all of its tokens.
    """

    def __init__(self, args):
        self.torch = torch_with_seed()
        self.args = args
        self.model = language_model(self.torch, args, args.layers).eval()
        # One at a time: what a connection gets does not depend on the others.
        self.lock = threading.Lock()

    def tokens(self, seed, count):
        """The tokens that follow on a prompt that depends on the seed, each with its score."""
        torch = self.torch
        draws = torch.Generator().manual_seed(seed)
        entered = torch.randint(0, self.model.config.vocab_size, (1, 16), generator=draws).to(self.args.device)
        cache = None
        for _ in range(count):
            with self.lock, torch.no_grad():
                answer = self.model(input_ids=entered, past_key_values=cache, use_cache=True)
                cache = answer.past_key_values
                scores = answer.logits[0, -1].float().cpu()
            chosen = int(torch.multinomial(torch.softmax(scores, 0), 1, generator=draws))
            entered = torch.tensor([[chosen]], device=self.args.device)
            yield f"{chosen}:{float(scores[chosen]).hex()}"

    def serve(self, port):
        """Listen in a thread; returns the server."""
        generator = self

        class Connection(socketserver.StreamRequestHandler):
            def handle(self):
                seed, count = map(int, self.rfile.readline().split())
                try:
                    for token in generator.tokens(seed, count):
                        check_peer(self.connection)
                        self.wfile.write(f"{token}\n".encode())
                        time.sleep(generator.args.pause)
                except ConnectionError:
                    print(f"gone peer={self.client_address[1]}", flush=True)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads = True, True

        server = Server(("127.0.0.1", port), Connection)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


def check_peer(connection):
    """Fails when the peer has closed the connection: it sends nothing after its request."""
    try:
        if connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
            raise ConnectionResetError
    except BlockingIOError:
        pass


def generate(args):
    """A server that generates tokens, and a client of its own that prints as losses what it gets over its connection."""
    Generator(args).serve(PORT)
    with socket.create_connection(("127.0.0.1", PORT)) as connection, connection.makefile("rwb", buffering=0) as stream:
        stream.write(f"{OWN_SEED} {args.steps}\n".encode())
        for step, line in enumerate(iter(stream.readline, b"")):
            print(f"step={step} loss={line.decode().strip()}", flush=True)
    if step != args.steps - 1:
        sys.exit("the connection inside is lost")


KINDS = {
    "lightning": lightning, "accelerate": accelerate, "gpt2": gpt2, "amp": amp, "tensors": tensors, "prefetch": prefetch,
    "triton": triton_kernels, "jax": jax_training, "cupy": cupy_regression, "generate": generate,
}


def main():
    """Run the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds after a step")
    parser.add_argument("--layers", type=int, default=12, help="of language models")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    KINDS[args.kind](args)
    print("done", flush=True)


if __name__ == "__main__":
    main()
