"""Ranks over sockets that wait for a slow one: rank 0 sleeps after each step, and the others wait in their sums on the GPU.

Every checkpoint locks all of them within the deadline, and the losses are those of an uninterrupted run without the sleep.
"""

import json
import shutil
import socket
import subprocess

import cases
import moves
import ranks
from cases import Case
from host import Container, Failed

SLEEP_MS = 150
# Steps of the uninterrupted run; what the job prints beyond them is not compared.
STEPS = 1500
# Locks by the driver worker alone, next to the checkpoints.
LOCKS = 50
# The default of the shim's gpu-lock.
DEADLINE_MS = 10_000


def all_cases(args):
    """A case for two, four and eight ranks."""
    return [Case(f"ranks-straggler-{count}", 580, count, straggling(f"ranks-straggler-{count}", count, args.straggler_rounds), ("straggler",))
            for count in (2, 4, 8)]


def straggling(name, count, rounds):
    """The case of so many ranks and checkpoints."""
    return lambda setup, end, record: waited_for(setup, end, record, name, count, rounds)


def waited_for(setup, end, record, name, count, rounds):
    """Checkpoint a running job again and again, then lock and unlock it; its losses stay right."""

    def job(*arguments):
        return cases.script(setup, "ddp.py", ["--ranks", f"{count}", *arguments], count, moves.SOCKETS)

    uuids = [gpu["uuid"] for gpu in setup.gpus][:count]
    record.update(gib=0.1, counters=count, uuid_before=uuids)
    reference = cases.losses(ranks.play_out(setup, end, f"{name}-reference", job("--steps", f"{STEPS}", "--pause-ms", "0"), uuids))
    source, workload = Container(setup.host, name), job("--pause-ms", "0", "--straggle-ms", f"{SLEEP_MS}")
    directory = f"{setup.host.memory}/{name}"
    record["locks_ms"] = locks = []
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        end.until("the ranks to reach the step", lambda: cases.reached(source, 10), 120)
        record["iter_before"] = max(cases.losses(source.lines()))
        for each in range(rounds):
            done, record["checkpoint_s"] = cases.timed(source.checkpoint_task, directory, end)
            record["checkpoint_ms"] = source.timings()
            if done.returncode:
                raise Failed(f"checkpoint {each + 1} of {rounds} failed: {done.stderr.strip()}; {source.timings()}")
            locks.append(source.timings().get("gpu-lock"))
            shutil.rmtree(directory)
            go_on(source, end, 2)
        record["worker_locks_ms"] = worker_locks(setup, source, end)
        go_on(source, end, 5)
        check(reference, cases.losses(source.lines()), record)
    finally:
        record["table"] = table(name, record)
        cases.clean_up(setup, [source], directories=[directory])


def go_on(source, end, steps):
    """Wait until the job has made so many more steps."""
    following = max(cases.losses(source.lines())) + steps
    end.until("the job to continue", lambda: source.has_ended() or cases.reached(source, following), 60)
    if source.has_ended():
        raise Failed("the job has ended: " + "; ".join(source.lines()[-20:]))


def check(reference, seen, record):
    """The job's losses are those of the uninterrupted run, without a gap."""
    steps = sorted(seen)
    wrong = [step for step in steps if step in reference and seen[step] != reference[step]]
    if steps != list(range(len(steps))) or wrong:
        raise Failed(f"steps {steps[:1]} to {steps[-1:]}, another loss at {wrong[:5]}")
    record.update(iter_after=steps[-1], losses_equal=len([step for step in steps if step in reference]))


def worker_locks(setup, container, end):
    """Milliseconds of locks that the driver worker makes for no checkpoint."""
    pids = [str(pid) for pid in container.pids(end)]
    listed = json.loads(setup.host.run("firn-gpu", "discover", *pids, deadline=end).stdout)
    pids = [process["pid"] for process in listed if process.get("restore_tid")]
    with Worker(setup.host) as worker:
        found = []
        for _ in range(LOCKS):
            end.left()
            (replies, took) = cases.timed(worker.ask, {"op": "lock", "pids": pids, "timeout_ms": DEADLINE_MS})
            refused = [reply for reply in replies if reply.get("error")]
            worker.ask({"op": "unlock", "pids": pids})
            if refused or len(replies) != len(pids):
                raise Failed(f"lock {len(found) + 1} of {pids}: {replies} after {took} s")
            found.append(took * 1000)
        return found


class Worker:
    """The driver worker, as the shim talks to it."""

    def __init__(self, host):
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        with theirs:
            program = shutil.which("firn-gpu", path=host.env["PATH"])
            command = [program, "serve", "--fd", f"{theirs.fileno()}"]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=host.env)
        self._socket, self._stream = ours, ours.makefile("rw", encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, request):
        """The replies about processes."""
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        replies = []
        for line in self._stream:
            reply = json.loads(line)
            if "process" in reply:
                replies.append(reply["process"])
            elif "done" in reply:
                return replies
            else:
                raise Failed(f"firn-gpu answered {line.strip()}")
        raise Failed("firn-gpu ended")


def table(name, record):
    """What the locks took, for people."""
    lines = []
    for kind, found in (("checkpoints", record["locks_ms"]), ("locks alone", record.get("worker_locks_ms", []))):
        took = sorted(ms for ms in found if ms is not None)
        if took:
            lines.append(f"{name}: {len(took)} {kind}, lock: least {took[0]:.0f} ms, median {took[len(took) // 2]:.0f} ms, most {took[-1]:.0f} ms")
    return lines
