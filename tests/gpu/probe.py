#!/usr/bin/env python3
"""What the driver's checkpoint calls answer for processes that cannot run freely.

    python3 tests/gpu/probe.py PROGRAM [ARGUMENTS]
    python3 tests/gpu/probe.py --migrate PROGRAM [ARGUMENTS]

With --migrate, on two GPUs, it swaps the GPUs of the program twice with the same map and prints where its memory is:
that shows whether a second map has to name the GPUs that the process has now or those that it began with. Else it starts PROGRAM (a CUDA program that runs for ever, such as gpu-counter), brings it into odd states one after the other
and prints, as a table, what each call of the driver answers there: a result, or `hangs` when it had none after three
seconds. Each call is made by a process of its own, as firn's worker would be. Needs root, a GPU and cgroup v2. This is
what tests/simgpu is held against.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

LIMIT = 3.0
SEIZE, INTERRUPT, CONT, DETACH = 0x4206, 0x4207, 7, 17


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class Pair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = [("old", Uuid), ("new", Uuid)]


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("rest", ctypes.c_ubyte * 60)]


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs."""

    _fields_ = [("pairs", ctypes.POINTER(Pair)), ("count", ctypes.c_uint), ("rest", ctypes.c_ubyte * 52)]


def call(operation, pid, pairs):
    """Make one call of the driver and print its answer: in a child process."""
    cuda = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int(-1)
    if operation in ("state", "tid"):
        function = cuda.cuCheckpointProcessGetState if operation == "state" else cuda.cuCheckpointProcessGetRestoreThreadId
        code = function(pid, ctypes.byref(value))
    elif operation == "lock":
        args = LockArgs(timeout_ms=2000)
        code = cuda.cuCheckpointProcessLock(pid, ctypes.byref(args))
    elif operation == "restore":
        args = RestoreArgs()
        array = (Pair * max(1, len(pairs)))()
        for item, (old, new) in zip(array, pairs):
            item.old.bytes[:], item.new.bytes[:] = bytes.fromhex(old), bytes.fromhex(new)
        if pairs:
            args.pairs, args.count = array, len(pairs)
        code = cuda.cuCheckpointProcessRestore(pid, ctypes.byref(args))
    else:
        function = {"checkpoint": cuda.cuCheckpointProcessCheckpoint, "unlock": cuda.cuCheckpointProcessUnlock}[operation]
        code = function(pid, ctypes.byref((ctypes.c_ubyte * 64)()))
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    answer = (name.value or str(code).encode()).decode()
    print(answer + (f" {value.value}" if operation in ("state", "tid") and code == 0 else ""))


def ask(operation, pid, pairs=(), limit=LIMIT, environment=None):
    """The answer to one call and the time it took."""
    words = [f"{old}={new}" for old, new in pairs]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--call", operation, str(pid), *words],
            capture_output=True, text=True, timeout=limit, check=False, env=environment)
        answer = done.stdout.strip() or f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        answer = "hangs"
    return answer, time.monotonic() - began


def report(situation, *answers):
    """One line of the table."""
    print(f"| {situation} | " + " | ".join(f"{what}: {answer}" for what, (answer, _) in answers) + " |", flush=True)


def both(pid):
    """State and restore thread."""
    return [("state", ask("state", pid)), ("tid", ask("tid", pid))]


class Freezer:
    """A cgroup of its own for one process."""

    def __init__(self, pid):
        self.path = f"/sys/fs/cgroup/firn-probe-{os.getpid()}"
        os.mkdir(self.path)
        self._write("cgroup.procs", pid)

    def _write(self, name, value):
        with open(f"{self.path}/{name}", "w", encoding="ascii") as file:
            file.write(str(value))

    def freeze(self, on):
        """Turn it on or off and wait."""
        self._write("cgroup.freeze", int(on))
        while True:
            with open(f"{self.path}/cgroup.events", encoding="ascii") as file:
                if f"frozen {int(on)}" in file.read():
                    return
            time.sleep(0.01)

    def remove(self):
        """Remove the cgroup of a process that has ended."""
        os.rmdir(self.path)


libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request, tid):
    """One ptrace request; whether it succeeded."""
    return libc.ptrace(request, tid, None, None) == 0


def scheduler_state(tid):
    """The letter in /proc."""
    with open(f"/proc/{tid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def hold(pid, leave):
    """Hold all threads but `leave`."""
    tids = [int(tid) for tid in os.listdir(f"/proc/{pid}/task") if int(tid) != leave]
    for tid in tids:
        ptrace(SEIZE, tid)
        ptrace(INTERRUPT, tid)
    time.sleep(0.3)
    return tids


def let_go(tids):
    """Release held threads."""
    for tid in tids:
        ptrace(DETACH, tid)


def run_only(tid):
    """Of a group-stopped process let one thread run."""
    ptrace(SEIZE, tid)
    ptrace(INTERRUPT, tid)
    for _ in range(20):
        time.sleep(0.05)
        if scheduler_state(tid) in "tT":
            ptrace(CONT, tid)
    return scheduler_state(tid)


def stop_again(tid):
    """Return it to the stop."""
    ptrace(INTERRUPT, tid)
    time.sleep(0.3)
    ptrace(DETACH, tid)


def main():
    """Bring the program into each situation and ask."""
    program = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
    pid = program.pid
    freezer = Freezer(pid)
    try:
        time.sleep(6)
        report("no process of that pid", *both(999999))
        report("a process without CUDA", *both(os.getppid()))
        report("running", *both(pid))
        tid = int(ask("tid", pid)[0].split()[-1])
        freezer.freeze(True)
        report("frozen", *both(pid))
        freezer.freeze(False)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        report("stopped (SIGSTOP)", *both(pid))
        os.kill(pid, signal.SIGCONT)
        held = hold(pid, tid)
        report("all but the restore thread held", *both(pid))
        let_go(held)
        report("running again", *both(pid))
        print(f"| lock | {ask('lock', pid, limit=10)} |")
        freezer.freeze(True)
        report("locked, frozen", *both(pid))
        freezer.freeze(False)
        held = hold(pid, tid)
        report("locked, held", *both(pid))
        print(f"| checkpoint while held | {ask('checkpoint', pid, limit=60)} |")
        report("checkpointed, held", *both(pid))
        let_go(held)
        freezer.freeze(True)
        report("checkpointed, frozen", *both(pid))
        freezer.freeze(False)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        report("checkpointed, stopped", *both(pid))
        print(f"| restore thread runs alone: state letter | {run_only(tid)} |")
        report("checkpointed, stopped, restore thread runs", *both(pid))
        print(f"| restore there | {ask('restore', pid, limit=60)} |")
        report("locked, stopped, restore thread runs", *both(pid))
        print(f"| unlock there | {ask('unlock', pid, limit=10)} |")
        stop_again(tid)
        os.kill(pid, signal.SIGCONT)
        report("running again", *both(pid))
    finally:
        program.kill()
        program.wait()
        freezer.remove()


def holders(pid):
    """UUIDs of the GPUs that hold memory of a process, without the prefix, and how many MiB."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    cells = [[cell.strip() for cell in row.split(",")] for row in rows]
    return {uuid: int(mib) for owner, uuid, mib in cells if owner == str(pid)}


def migrate():
    """Swap twice."""
    rows = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    uuids = [word.rstrip(")") for word in rows.split() if word.startswith("GPU-")]
    first, second = [uuid.removeprefix("GPU-").replace("-", "") for uuid in uuids[:2]]
    program = subprocess.Popen(sys.argv[2:])
    try:
        time.sleep(8)
        print(f"| at the start | {holders(program.pid)} |", flush=True)
        for turn in ("first swap", "second swap, same map"):
            answers = [ask(step, program.pid, limit=60)[0] for step in ("lock", "checkpoint")]
            answers.append(ask("restore", program.pid, [(first, second), (second, first)], limit=60)[0])
            answers.append(ask("unlock", program.pid, limit=10)[0])
            time.sleep(1)
            print(f"| {turn} | {answers} | {holders(program.pid)} |", flush=True)
        time.sleep(1)
    finally:
        program.kill()
        program.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        call(sys.argv[2], int(sys.argv[3]), [tuple(word.split("=")) for word in sys.argv[4:]])
    elif sys.argv[1:2] == ["--migrate"]:
        migrate()
    else:
        main()
