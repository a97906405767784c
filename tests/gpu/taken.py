"""Takes a program's GPU memory out and puts it back, with the driver's checkpoint and restore in between; without firn.

The interposer's library has to be built (`cargo build --release --manifest-path interposer/library/Cargo.toml`). Prints
each cycle as a line of JSON: how long the program stands still and each step took, in milliseconds. For example

    python3 taken.py --library libfirn_cuda.so --cycles 3 --begin "step=5 " -- python3 pipeline.py --steps 60

compares what the program prints with what it prints without a cycle. `--exchange` restores onto two GPUs the other way
round. `--without-driver` leaves the driver's calls out, for a library that stands for libcuda. Needs root.
"""

import argparse
import array
import ctypes
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time

MAGIC = int.from_bytes(b"firncuda", "little")
HELLO, SHUT, OPEN, REHEARSE, LEND, DETACH, ATTACH = range(1, 8)
ANSWERS = ["", "done", "busy", "failed", "unknown", "refused", "working", "away", "idle"]
PIECES = 64
PIDFD_GETFD = 438


class Refused(Exception):
    """The library does not do what it was asked for."""


class Process:
    """A process with the library, as firn-interposer-client finds and asks it."""

    def __init__(self, pid, library):
        self.pid, self.number = pid, time.monotonic_ns()
        symbols = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True).stdout
        offset = next(int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(" firn_cuda_area"))
        name = os.path.basename(library)
        with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
            lines = [line.split() for line in maps if line.rstrip().endswith(name)]
        base = next(int(line[0].split("-")[0], 16) for line in lines if int(line[2], 16) == 0)
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            memory.seek(base + offset)
            area = struct.unpack("Q", memory.read(8))[0]
            memory.seek(area if area > 1 else base)
            magic, first, _ = struct.unpack("QQQ", memory.read(24))
        if area < 2 or magic != MAGIC:
            raise LookupError("it shows nothing")
        libc = ctypes.CDLL(None, use_errno=True)
        end = libc.syscall(PIDFD_GETFD, os.pidfd_open(pid), first >> 32, 0)
        if end < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        self.end = socket.socket(fileno=end)

    def ask(self, kind, wait=0, begin=0, count=0, descriptors=()):
        """The descriptors that come with the answer, which has to be `done`."""
        self.number += 1
        message = struct.pack("<QIIQIIQ", MAGIC, 1, kind, self.number, wait, begin, count).ljust(64, b"\0")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.end.sendmsg([message], rights)
        while True:
            if not select.select([self.end], [], [], 3 * wait / 1000 + 10)[0]:
                raise TimeoutError(f"no answer to {kind}")
            answer, control, _, _ = self.end.recvmsg(64, 4096)
            received = array.array("i", b"".join(data[: len(data) // 4 * 4] for _, _, data in control))
            _, _, answered, number, first, second = struct.unpack("<QIIQII", answer[:32])
            if number == self.number:
                if ANSWERS[answered] != "done":
                    raise Refused(f"{kind}: {ANSWERS[answered]} {first} {second}")
                return list(received)


class Uuid(ctypes.Structure):
    """CUuuid"""

    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class Pair(ctypes.Structure):
    """CUcheckpointGpuPair"""

    _fields_ = [("old", Uuid), ("new", Uuid)]


class Restore(ctypes.Structure):
    """CUcheckpointRestoreArgs"""

    _fields_ = [("pairs", ctypes.POINTER(Pair)), ("count", ctypes.c_uint), ("reserved", ctypes.c_ubyte * 52)]


class Driver:
    """The driver's checkpoint calls."""

    def __init__(self, exchanges):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.cuda.cuInit(0)
        self.uuids = [Uuid(), Uuid()]
        self.exchanges = exchanges
        if exchanges:
            for ordinal, uuid in enumerate(self.uuids):
                self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), ordinal)

    def call(self, name, *arguments):
        """A call, which has to succeed."""
        result = getattr(self.cuda, name)(*arguments)
        if result:
            raise Refused(f"{name}: {result}")

    def move(self, pid):
        """Checkpoints and restores a process."""
        limit = (ctypes.c_uint * 16)(10000)
        self.call("cuCheckpointProcessLock", pid, limit)
        self.call("cuCheckpointProcessCheckpoint", pid, None)
        where = None
        if self.exchanges:
            old, new = self.uuids, self.uuids[::-1]
            pairs = (Pair * 2)(*[Pair(*pair) for pair in zip(old, new)])
            where = ctypes.byref(Restore(pairs, 2))
            self.uuids = new
        self.call("cuCheckpointProcessRestore", pid, where)
        self.call("cuCheckpointProcessUnlock", pid, None)


def cycle(process, driver):
    """One cycle: the milliseconds of each step."""
    steps, begun = {}, time.monotonic()

    def timed(name, does):
        before = time.monotonic()
        result = does()
        steps[name] = round((time.monotonic() - before) * 1000, 1)
        return result

    def lent():
        pieces = []
        while True:
            more = process.ask(LEND, 10000, len(pieces), PIECES)
            pieces += more
            if len(more) < PIECES:
                return pieces

    def attach():
        for begin in range(0, len(pieces), PIECES):
            some = pieces[begin : begin + PIECES]
            process.ask(ATTACH, 30000, begin, len(some), some)
            for piece in some:
                os.close(piece)

    timed("shut", lambda: process.ask(SHUT, 5000))
    timed("rehearse", lambda: process.ask(REHEARSE, 5000))
    pieces = timed("lend", lent)
    timed("detach", lambda: process.ask(DETACH, 10000))
    if driver:
        timed("driver", lambda: driver.move(process.pid))
    timed("attach", attach)
    timed("open", lambda: process.ask(OPEN))
    return {"pieces": len(pieces), "stands_still": round((time.monotonic() - begun) * 1000, 1), **steps}


def found(program, library):
    """The program's process, once it can be asked."""
    for _ in range(600):
        try:
            return Process(program.pid, library)
        except (LookupError, OSError, StopIteration):
            if program.poll() is not None:
                raise
            time.sleep(0.1)
    raise TimeoutError("it makes no context")


def main():
    """Run the program twice, and take its memory out in the second run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--begin", default="", help="begin when it has printed this")
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--without-driver", action="store_true")
    parser.add_argument("--endless", action="store_true", help="the program does not end by itself: no comparison")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    library = os.path.abspath(args.library)
    environment = dict(os.environ, LD_PRELOAD=library)
    expected = None
    if not args.endless:
        expected = subprocess.run(args.command, env=environment, check=True, capture_output=True).stdout
    with tempfile.NamedTemporaryFile() as printed:
        with subprocess.Popen(args.command, env=environment, stdout=printed, stdin=subprocess.PIPE) as program:
            try:
                process = found(program, library)
                driver = None if args.without_driver else Driver(args.exchange)
                while args.begin.encode() not in open(printed.name, "rb").read():
                    time.sleep(0.05)
                for _ in range(args.cycles):
                    print(json.dumps(cycle(process, driver)), flush=True)
                    time.sleep(0.3)
                if not args.endless:
                    program.wait()
            finally:
                if program.poll() is None:
                    program.kill()
        got = open(printed.name, "rb").read()
    if expected is not None and got != expected:
        sys.exit(f"it printed something else: see {len(got)} instead of {len(expected)} bytes")


if __name__ == "__main__":
    main()
