"""A PyTorch training loop whose losses depend on the seed alone; prints each in full precision.

Interrupted and restored at any step it must print the losses of an uninterrupted run.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import multiprocessing
import os
import socket
import socketserver
import threading
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # after the variable that cuBLAS reads


def managed(size):
    """Allocate `size` bytes of managed memory in torch's context; returns what fills it, and checks that it did, on the CPU."""
    driver = ctypes.CDLL("libcuda.so.1")
    memory = ctypes.c_void_p()
    attach_global = 1
    status = driver.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(size), attach_global)
    if status:
        raise SystemExit(f"cuMemAllocManaged: error {status}")

    def fill(value):
        status = driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(value), ctypes.c_size_t(size)) or driver.cuCtxSynchronize()
        if status or ctypes.string_at(memory, size) != bytes([value % 256]) * size:
            raise SystemExit(f"managed memory cannot be filled: error {status}")

    return fill


ROWS = 256  # of a batch


def row(width, index):
    """A row that depends on its index alone."""
    return torch.randn(width, generator=torch.Generator().manual_seed(index))


class Drawn(torch.utils.data.Dataset):
    """Such rows."""

    def __init__(self, rows, width):
        self.rows, self.width = rows, width

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return row(self.width, index)


def have_child():
    """Start of a pool's worker: fork a child, which waits until the worker ends."""
    torch.set_num_threads(1)
    end, held = os.pipe()
    if not os.fork():
        os.close(held)
        os.read(end, 1)
        os._exit(0)


def as_list(width, index):
    """A row as a pool's worker sends it."""
    return row(width, index).tolist()


def batches(args):
    """One batch for each step: drawn on the GPU, by workers that hand it over in pinned memory, or by a pool over pipes.

    Workers and pool are started from a process with CUDA.
    """
    if args.workers:
        loader = torch.utils.data.DataLoader(
            Drawn(args.steps * ROWS, args.width), ROWS, num_workers=args.workers, pin_memory=True,
            multiprocessing_context=args.start)
        for batch in loader:
            yield batch.cuda(non_blocking=True)
    elif args.pool:
        with multiprocessing.get_context("fork").Pool(args.pool, have_child) as pool:
            for first in range(0, args.steps * ROWS, ROWS):
                rows = pool.map(functools.partial(as_list, args.width), range(first, first + ROWS))
                yield torch.tensor(rows, device="cuda")
    else:
        for _ in range(args.steps):
            yield torch.randn(ROWS, args.width, device="cuda")


def serve(port):
    """Answer lines on `port`, and be a client of that: the process ends if the two lose each other.

    The process prints the port of every client that it has lost.
    """

    class Echo(socketserver.StreamRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):
                for line in self.rfile:
                    self.wfile.write(line)
            # In one call: print by two threads may mix their lines.
            os.write(1, f"gone peer={self.client_address[1]}\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads = True, True

    def ask(connection):
        for question in itertools.count():
            line = b"%d\n" % question
            connection.write(line)
            if connection.readline() != line:
                print("the connection inside is lost", flush=True)
                os._exit(3)
            time.sleep(0.05)

    server = Server(("127.0.0.1", port), Echo)
    connection = socket.create_connection(("127.0.0.1", port)).makefile("rwb", buffering=0)
    for target, arguments in ((server.serve_forever, ()), (ask, (connection,))):
        threading.Thread(target=target, args=arguments, daemon=True).start()


def main():
    """Train and print `step=N loss=<hex float>` lines, then `done`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--managed-mib", type=int, default=0, help="managed memory to hold and fill at every step")
    parser.add_argument("--workers", type=int, default=0, help="processes of a DataLoader that draw the batches")
    parser.add_argument("--start", default="fork", help="how they are started")
    parser.add_argument("--pool", type=int, default=0, help="processes of a pool that draw the batches; each forks a child")
    parser.add_argument("--serve", type=int, help="port on which to answer lines, also to a client of its own")
    parser.add_argument("--compile", help="mode of torch.compile")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)

    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(args.width, args.width), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    model = torch.nn.Sequential(*layers).cuda()
    run = torch.compile(model, mode=args.compile) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fill = managed(args.managed_mib << 20) if args.managed_mib else lambda value: None
    for step, batch in enumerate(batches(args)):
        fill(step)
        loss = ((run(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step={step} loss={loss.item().hex()}", flush=True)
        time.sleep(args.pause)
    print("done", flush=True)


if __name__ == "__main__":
    main()
