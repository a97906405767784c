"""Turns of several jobs on one GPU, given by examples/time-slicing: what the jobs compute, and what a turn costs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading

import cases
import job_cases
import kills
import patient
import pauses
from cases import Case
from host import NAMESPACE, Container, Failed

TURNS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/time-slicing/turns")
TURN_S = 2
QUEUE = [*pauses.RELEASE, "--label", "turns=slices"]
COPIES = ("gpu-checkpoint", "gpu-restore")
# Of the time lost in a turn to the time of the driver's copies in it.
MOST = 1.15
# Of the trainings' layers: 6 GiB on the GPU, so that the driver's copies take seconds.
WIDTH = 8192


def all_cases(args):
    """Two of the cases of the group `pauses`; `args` are those of run.py."""
    return [
        Case("time-slices", 560, 1, lambda setup, end, record: trainings(setup, end, record, args.turns), ("pauses", "asked-for")),
        Case("time-slices-counters", 240, 1, lambda setup, end, record: counters(setup, end, record, args.mib), ("pauses",)),
    ]


class Timings:
    """firn's timings of containers, each before the next transaction replaces it, until the end of the block."""

    def __init__(self, containers):
        self._containers = containers
        self._seen = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self):
        while not self._over.wait(0.02):
            self._look()

    def _look(self):
        for container in self._containers:
            path = f"{container.bundle()}/firn-timings.json"
            # A file that is half written is read again.
            with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                found = json.load(file)
                self._seen[container.name, os.fstat(file.fileno()).st_mtime_ns] = found

    def in_order(self):
        """All of them."""
        return [found for _, found in sorted(self._seen.items(), key=lambda item: item[0][1])]


def trainings(setup, end, record, count):
    """Two trainings take turns by examples/time-slicing: the losses of each are those of an uninterrupted run."""
    uuids, _ = setup.pick(1)
    jobs = {Container(setup.host, f"slices-{seed}"): seed for seed in (20, 21)}
    record.update(gib=0.1, counters=2, uuid_before=uuids)
    try:
        for container, seed in jobs.items():
            workload = training(setup, ["--width", f"{WIDTH}", "--pause", "0.02", "--steps", "1000000", "--seed", f"{seed}"])
            container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        for container in jobs:
            end.until(f"{container.name} to train", lambda: job_cases.reached(container, 3), 120)
        record["gib"] = round(turns(setup, end, record, list(jobs), count) / 1024, 2)
        printed = {}
        for container, seed in jobs.items():
            container.remove(end)
            printed[seed] = cases.losses(container.lines())
        for seed, seen in printed.items():
            arguments = ["--width", f"{WIDTH}", "--pause", "0", "--seed", f"{seed}"]
            same_losses(play_out(setup, end, arguments, max(seen) + 1), seen)
        record["losses_equal"] = [len(seen) for seen in printed.values()]
        record["uuid_after"] = uuids
        record["table"].append(f"steps with the losses of uninterrupted runs: {record['losses_equal']}; ratio at most {MOST}")
        if record["ratio"] > MOST:
            raise Failed(f"a turn loses {record['ratio']:.2f} of the driver's copy time, more than {MOST}")
    finally:
        cases.clean_up(setup, list(jobs))


def counters(setup, end, record, mib):
    """The same with counters, also where there is no PyTorch; what a turn loses is not judged."""
    uuids, _ = setup.pick(1)
    containers = [Container(setup.host, f"turns-{letter}") for letter in "abc"]
    record.update(gib=mib / 1024, counters=3, uuid_before=uuids)
    try:
        for container in containers:
            pauses.begun(setup, container, pauses.counter(["--mib", f"{mib // 4}"], QUEUE), uuids, end)
        turns(setup, end, record, containers, 12)
        for container in containers:
            patient.went_on(container, record)
        record["uuid_after"] = uuids
    finally:
        cases.clean_up(setup, containers)


def turns(setup, end, record, containers, count):
    """Let the example's program give so many turns; returns the MiB on the GPU in the last. Fills `lost_s`, `copies_s`, `ratio`."""
    log = f"{setup.host.work}/logs/{containers[0].name}.turns"
    address = f"{setup.host.work}/containerd.sock"
    environment = {**setup.host.env, "CONTAINERD_ADDRESS": address, "CONTAINERD_NAMESPACE": NAMESPACE}
    command = [TURNS, "--seconds", f"{TURN_S}", "--look", "0.1", "labels.turns==slices"]

    def resumed():
        if program.poll() is not None:
            raise Failed(f"turns has ended: {' / '.join(read_lines(log)[-3:])}")
        return sum(line.startswith("resume ") for line in read_lines(log))

    with Timings(containers) as timings:
        with open(log, "wb") as output:
            program = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            end.until(f"{count} turns", lambda: resumed() >= count, 500)
            program.send_signal(signal.SIGTERM)
            program.wait(end.left(60))
        finally:
            program.kill()
            program.wait()
    running = [container for container in containers if container.status(end) == "RUNNING"]
    if len(running) != 1 or program.returncode:
        raise Failed(f"turns ended with {program.returncode} and left running {[each.name for each in running]}")
    kills.undisturbed(running[0], end, "its turn is the last")
    record.update(account(read_lines(log), timings.in_order()))
    record["table"] = turns_table(record)
    return pauses.used(setup.gpus[0]["uuid"])


def read_lines(path):
    """Whole lines of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read().split("\n")[:-1]


def account(lines, timings):
    """What the exchanges have cost: a pause and the resume that follows it, as the program has measured them, against the
    driver's copies in the same calls."""
    errors = [line for line in lines if "failed" in line]
    if errors:
        raise Failed(f"turns: {errors[0]}")
    calls = [(match[1], match[2], float(match[3])) for match in (re.fullmatch(r"(\w+) (\S+): ([\d.]+) s", line) for line in lines) if match]
    called, seen = [call[:2] for call in calls], [(found["op"], found["container"]) for found in timings]
    if called != seen:
        raise Failed(f"turns has called {called}, timings were seen of {seen}")
    copies = [sum(phase["ms"] for phase in found["phases"] if phase["name"] in COPIES) / 1000 for found in timings]
    # A new container that is paused at once costs the one that runs nothing.
    ends = [at for at in range(1, len(calls)) if (calls[at - 1][0], calls[at][0]) == ("pause", "resume")]
    lost, copied = (sum(each[at - 1] + each[at] for at in ends) for each in ([call[2] for call in calls], copies))
    if not copied:
        raise Failed("the driver copied nothing")
    return {"turns": len(ends), "lost_s": round(lost, 2), "copies_s": round(copied, 2), "ratio": round(lost / copied, 3)}


def turns_table(record):
    """The account for people."""
    lost, copies = record["lost_s"] / record["turns"], record["copies_s"] / record["turns"]
    return [f"{record['case']}: {record['turns']} turns of {TURN_S} s; an exchange loses {lost:.2f} s, of which the driver copies "
            f"{copies:.2f} s: ratio {record['ratio']:.2f}"]


def training(setup, arguments):
    """train.py in a container whose pause gives its GPU free, in the queue of `turns`."""
    return cases.script(setup, "train.py", arguments, 1, QUEUE)


def play_out(setup, end, arguments, steps):
    """The losses of an uninterrupted training."""
    return cases.losses(cases.play_out(setup, end, "uninterrupted", steps, arguments))


def same_losses(reference, found):
    """A training has printed what an uninterrupted one prints, from the first step on and without a gap."""
    if sorted(found) != list(range(len(found))):
        raise Failed(f"steps are missing: {len(found)} of {max(found) + 1}")
    wrong = [step for step, loss in found.items() if reference.get(step) != loss]
    if wrong:
        raise Failed(f"loss {found[wrong[0]]} at step {wrong[0]}, uninterrupted {reference.get(wrong[0])}")
