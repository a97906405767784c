"""A small runtime whose state can leave every device: it continues by CUDA, or on the CPU where there is no GPU.

    device_free.py run          the job: `step=12 value=1a2b3c4d device=GPU-...` for each step, `device=cpu` without a GPU
    device_free.py release      for the hook prepare: returns when the job holds no device any more
    device_free.py take         for the other hooks: returns when the job has looked for a device

A program is a list of operations that every device has, and its state is an array of bytes. The main process never loads
a driver: CUDA has its device open until the process ends. A worker process owns the GPU. It gets the state, runs
operations on it, and returns it before it ends.
"""

import ctypes
import os
import pathlib
import pickle
import subprocess
import sys
import time
import zlib

# firn's tmpfs of a container with hooks; its files are in the checkpoint.
DIRECTORY = pathlib.Path(os.environ.get("FIRN_JOB_DIRECTORY", "/run/firn"))
SIZE = 1 << 20
BLOCK = SIZE // 16


def program(step):
    """The operations of a step: each moves a block or writes one."""
    source, target = (step * 7919 % (SIZE - BLOCK), (step * 104729 + 1) % (SIZE - BLOCK))
    return [("move", target, source, BLOCK), ("fill", step * 31 % SIZE, 1, step % 256), ("fill", source, BLOCK // 2, step % 251)]


class Cpu:
    """Operations on an array of this process."""

    name = "cpu"

    def __init__(self, state):
        self._state = bytearray(state)

    def move(self, target, source, size):
        """Copy a block; the two may overlap."""
        self._state[target : target + size] = bytes(self._state[source : source + size])

    def fill(self, start, size, value):
        """Write the same byte many times."""
        size = min(size, len(self._state) - start)
        self._state[start : start + size] = bytes([value]) * size

    def read(self):
        """The state."""
        return bytes(self._state)

    def release(self):
        """The state; nothing is held."""
        return self.read()


class Cuda:
    """The same operations in GPU memory, by libcuda alone."""

    def __init__(self, state):
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context, uuid = ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
        self._address, self._second = ctypes.c_uint64(), ctypes.c_uint64()
        self._size = len(state)
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        for address in (self._address, self._second):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self._size))
        self._call("cuMemcpyHtoD_v2", self._address, state, ctypes.c_size_t(self._size))
        text = bytes(uuid).hex()
        self.name = "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def _call(self, name, *arguments):
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")

    def _at(self, offset):
        return ctypes.c_uint64(self._address.value + offset)

    def move(self, target, source, size):
        """By way of other memory, because the blocks may overlap."""
        for to, begin in ((self._second, self._at(source)), (self._at(target), self._second)):
            self._call("cuMemcpyDtoD_v2", to, begin, ctypes.c_size_t(size))

    def fill(self, start, size, value):
        """Write the same byte many times."""
        self._call("cuMemsetD8_v2", self._at(start), ctypes.c_ubyte(value), ctypes.c_size_t(min(size, self._size - start)))

    def read(self):
        """The state."""
        state = ctypes.create_string_buffer(self._size)
        self._call("cuMemcpyDtoH_v2", state, self._address, ctypes.c_size_t(self._size))
        return state.raw


class Worker:
    """A device that a process of its own holds. Fails where the process finds none."""

    def __init__(self, state):
        command = [sys.executable, __file__, "work"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._send(state)
            self.name = self._receive()
        except (BrokenPipeError, EOFError):
            self._process.communicate()
            raise OSError("no device") from None

    def _send(self, thing):
        pickle.dump(thing, self._process.stdin)
        self._process.stdin.flush()

    def _receive(self):
        return pickle.load(self._process.stdout)

    def _ask(self, *request):
        self._send(request)
        return self._receive()

    def move(self, *arguments):
        self._ask("move", *arguments)

    def fill(self, *arguments):
        self._ask("fill", *arguments)

    def read(self):
        """The state."""
        return self._ask("read")

    def release(self):
        """The state. The process has ended, and with it all that the driver had of the job."""
        state = self.read()
        self._process.communicate()
        return state


def work():
    """The worker: its first message is the state, each other one a request. It ends with its input."""
    try:
        device = Cuda(pickle.load(sys.stdin.buffer))
    except OSError as error:
        sys.exit(f"no GPU: {error}")
    answer = device.name
    while True:
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        try:
            name, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = getattr(device, name)(*arguments)


def find_device(state):
    """A GPU if there is one, else the CPU."""
    try:
        return Worker(state)
    except OSError:
        return Cpu(state)


def advance(device, step):
    """Run a step; its value depends on the whole state."""
    for name, *arguments in program(step):
        getattr(device, name)(*arguments)
    return zlib.crc32(device.read())


def values(count):
    """What a job that is never moved prints, by step."""
    device = Cpu(bytes(SIZE))
    return {step: f"{advance(device, step):08x}" for step in range(count)}


def read(path):
    """Its text; empty without a file."""
    return path.read_text() if path.exists() else ""


def write(path, text):
    """Whole, or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.rename(path)


def run(pause=0.05):
    """The job. It looks at the request of a hook between two steps."""
    device, done, step = find_device(bytes(SIZE)), "", 0
    while True:
        request = read(DIRECTORY / "request")
        if request != done:
            state = device.release()
            device = Cpu(state) if request == "release" else find_device(state)
            write(DIRECTORY / "done", request)
            done = request
        print(f"step={step} value={advance(device, step):08x} device={device.name}", flush=True)
        step += 1
        time.sleep(pause)


def ask(request):
    """The hook's side: the job answers by a file. A deadline of firn's bounds the wait."""
    write(DIRECTORY / "request", request)
    while read(DIRECTORY / "done") != request:
        time.sleep(0.01)


if __name__ == "__main__":
    actions = {"run": run, "work": work, "release": lambda: ask("release"), "take": lambda: ask("take")}
    actions[sys.argv[1]]()
