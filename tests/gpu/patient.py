"""Checkpoints whose rollback needs patience: the driver is still copying, or somebody else has taken the GPU's memory."""

import concurrent.futures
import contextlib
import mmap
import os
import re
import subprocess
import sys
import time

import cases
import host as hosts
import kills
from cases import Case
from host import Container, Failed

# Of the process whose GPU memory somebody else takes: its image is written.
SUSPENDED_MIB = 4096
SHORT = '[deadlines]\ngpu-checkpoint = "2s"\n'
HERE = os.path.dirname(os.path.abspath(__file__))


def all_cases(gib, mib):
    """The cases with a process of `gib` GiB of GPU memory; `mib` MiB where others take its memory."""
    shared = min(mib * 4, SUSPENDED_MIB)
    return [
        Case("patient", 400, 1, lambda setup, end, record: patient(setup, end, record, gib), ("asked-for",)),
        Case("suspended", 240, 1, lambda setup, end, record: suspended(setup, end, record, shared)),
    ]


def patient(setup, end, record, gib):
    """firn-gpu is killed while the driver copies; then the deadline for that copy is far too short: the workload continues."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "patient")
    workload = cases.counter(["--mib", f"{gib * 1024:.0f}"])
    record.update(gib=gib, counters=1, uuid_before=uuids)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        record["grown_gib"] = grow_memory(gib, end)
        with bottomless(setup.host) as images:
            container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
            cases.wait_for_counts(container, end, 1, {}, 3)
            cases.check_holders(container, end, uuids, gib)
            began = time.monotonic()
            call = lambda: container.checkpoint_task(f"{images}/killed", end)
            message = kills.killed(pool, record, kills.by_signs(gib), container, call, "firn-gpu", "gpu_checkpoint")
            expect_code(message)
            record["killed"] = comes_back(container, end, message, began)

            setup.host.put(hosts.FIRN_CONFIG, SHORT)
            began = time.monotonic()
            done = container.checkpoint_task(f"{images}/late", end)
            if not done.returncode:
                raise Failed("the checkpoint kept a deadline of 2 s")
            expect_code(done.stderr)
            record["late"] = comes_back(container, end, done.stderr, began)
            left = sorted(os.listdir(images))
            if left:
                raise Failed(f"images are left: {left}")
        went_on(container, record)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        cases.clean_up(setup, [container])


def comes_back(container, end, message, began):
    """The workload continues: by itself, or, when it was suspended, once it is resumed. Returns which, and after how long."""
    answered = time.monotonic() - began
    how = "continued"
    if "FIRN-GPU-SUSPENDED" in message:
        how = "was suspended, continued when resumed"
        end.until("resume to work", lambda: resume(container, end).returncode == 0, 180)
    kills.goes_on(container, end, f"{how}: {message.strip()}")
    return f"{how}, answer after {answered:.1f} s, counts after {time.monotonic() - began:.1f} s: {message.strip()[:300]}"


def suspended(setup, end, record, mib):
    """Somebody takes the GPU memory during a checkpoint: suspended until it is free; one that is suspended can be killed."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "suspended")
    workload = cases.counter(["--mib", f"{mib}"])
    record.update(gib=mib / 1024, counters=1, uuid_before=uuids)
    image = f"{setup.host.memory}/suspended"
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        cases.wait_for_counts(container, end, 1, {}, 3)
        with Occupier(setup.host) as occupier:
            suspend(container, end, record, occupier, f"{image}-1")
            seen = cases.counts(container)
            for attempt in range(2):
                done = resume(container, end)
                record[f"resume_occupied_{attempt}"] = done.stderr.strip()
                if not done.returncode or "FIRN-GPU-OCCUPIED" not in done.stderr:
                    raise Failed(f"resume while the GPU is occupied: {done.returncode}: {done.stderr.strip()}")
            expect_status(container, end, "PAUSED")
            if cases.counts(container) != seen:
                raise Failed("a suspended container counts")
        done, record["resume_s"] = cases.timed(lambda: resume(container, end))
        if done.returncode:
            raise Failed(f"resume when the GPU is free: {done.stderr.strip()}")
        kills.goes_on(container, end, "it was suspended and resumed")
        record["uuid_after"] = cases.check_holders(container, end, uuids, mib / 1024)
        went_on(container, record)

        with Occupier(setup.host) as occupier:
            suspend(container, end, record, occupier, f"{image}-2")
            _, record["remove_s"] = cases.timed(lambda: container.remove(end))
        kills.is_gone(container, end, "it was suspended, killed and deleted")
    finally:
        cases.clean_up(setup, [container], directories=[f"{image}-1", f"{image}-2"])


def suspend(container, end, record, occupier, image):
    """Checkpoint while somebody waits for the memory; it must end suspended."""
    held = occupier.comes_to_rest(end)
    done = container.checkpoint_task(image, end)
    message = done.stderr.strip()
    record.setdefault("suspended", []).append(message)
    if not done.returncode:
        raise Failed(f"the GPU's memory was not taken: {held} MiB were held before, {occupier.held()} MiB are")
    if "FIRN-GPU-SUSPENDED" not in message:
        raise Failed(f"not suspended: {message}")
    expect_status(container, end, "PAUSED")
    if f"{image} is complete" in message:
        cases.check_image(image, True)
    elif os.path.exists(image):
        raise Failed(f"{image} is left: {message}")


class Occupier:
    """occupier.py, which takes what is free on the first GPU and whatever becomes free, until the end of the block."""

    def __init__(self, host):
        self._host = host
        self._output = f"{host.work}/logs/occupier.out"

    def __enter__(self):
        environment = {**self._host.env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, f"{HERE}/occupier.py"], env=environment, stdout=output, stderr=output, start_new_session=True
            )
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()

    def held(self):
        """MiB that it has reported to hold."""
        with open(self._output, encoding="utf-8") as file:
            text = file.read()
        if self._process.poll() is not None:
            raise Failed(f"the occupier has ended: {text.strip()}")
        return int((re.findall(r"holds (\d+)\n", text) or ["0"])[-1])

    def comes_to_rest(self, end):
        """Waits until there is nothing more to take; returns what it holds."""
        last = [end.until("the occupier to hold memory", self.held)]

        def at_rest():
            before, last[0] = last[0], self.held()
            time.sleep(0.3)
            return before == last[0] == self.held()

        end.until("the occupier to have all that is free", at_rest)
        return last[0]


def resume(container, end):
    """`ctr task resume`."""
    return container.host.ctr("tasks", "resume", container.name, check=False, deadline=end)


def expect_status(container, end, status):
    """As containerd reports it."""
    found = container.status(end)
    if found != status:
        raise Failed(f"{container.name} is {found}, not {status}")


def expect_code(message):
    """The message has a code."""
    if "FIRN-" not in message:
        raise Failed(f"no code: {message.strip()}")


def went_on(container, record):
    """No iteration is missing, from the first to the last, and the memory was right in each."""
    (iterations,) = (sorted(found) for found in cases.counts(container).values())
    if iterations != list(range(len(iterations))):
        raise Failed(f"iterations are missing or were printed twice: {iterations}")
    record["iter_before"], record["iter_after"] = iterations[0], iterations[-1]


@contextlib.contextmanager
def bottomless(host):
    """A directory on a file system that does not report its size: no image is written, and firn asks whether it would fit."""
    place = f"{host.work}/images"
    os.makedirs(place, exist_ok=True)
    subprocess.run(["mount", "-t", "ramfs", "-o", "mode=0700", "firn-gpu", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def available_gib():
    """Memory that the machine reports as available."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) / (1 << 20)


def grow_memory(gib, end):
    """Let a machine whose memory grows as it is used have room for what the driver will copy. Returns what it had and has.

    A child takes the memory and ends: the machine keeps it.
    """
    had, wanted = available_gib(), gib + 4
    if had < wanted:
        code = f"import patient; patient.fill({wanted})"
        filled = subprocess.run([sys.executable, "-c", code], cwd=HERE, check=False, timeout=end.left(150))
        if available_gib() < gib:
            raise Failed(f"the machine has {available_gib():.0f} GiB, not {gib:g} (the child: {filled.returncode})")
    return f"{had:.0f} -> {available_gib():.0f}"


def fill(gib):
    """Take so many GiB of memory, all of it written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    taken = [mmap.mmap(-1, 1 << 30, flags=flags) for _ in range(int(gib))]
    print(len(taken))
