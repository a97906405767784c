"""Programs killed in the middle of a checkpoint or restore: the counter continues, or nothing of the container is left.

The moment of each kill is read off the machine (which programs run, how much memory the workload has), so that it is the
same for any shim.
"""

import concurrent.futures
import contextlib
import glob
import os
import random
import signal
import time

import cases
from cases import Case
from host import NAMESPACE, Container, Failed

# What a transaction runs; none of it may outlive the transaction.
PROGRAMS = ("firn-gpu", "criu", "runc")
WORKLOAD = "gpu-counter"
# Into a dump or restore by CRIU, which takes seconds for the sizes here.
INTO_CRIU = 0.4


def case(gib):
    """The kill matrix of a process with `gib` GiB of GPU memory."""
    return Case("kills", 300, 1, lambda setup, end, record: kills(setup, end, record, gib))


def often_case(rounds):
    """Runc or CRIU killed `rounds` times at random moments of a dump."""
    return Case("kills-anywhere", 580, 1, lambda setup, end, record: kills_anywhere(setup, end, record, rounds), ("asked-for",))


def running(program):
    """Pids of the processes that run it, but for zombies."""
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            with open(f"{path}/comm", encoding="utf-8") as file:
                comm = file.read().strip()
            with open(f"{path}/stat", encoding="utf-8") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
            if comm == program[:15] and state not in "ZX":
                found.append(int(path.rsplit("/", 1)[1]))
    return found


def shims(name):
    """Pids of the shim that was started for a container."""
    found = []
    for pid in running("containerd-shim-firn-v2"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if name.encode() in file.read().split(b"\0"):
                found.append(pid)
    return found


def status(pid, name):
    """A field of /proc/PID/status as a number, 0 when the process has gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


class Moments:
    """When to kill; each waits for its moment and returns."""

    def __init__(self, call, gib):
        self._call = call
        self._memory = gib * (1 << 20)

    def reach(self, moment):
        """Wait for it while the client's call lasts."""
        end = time.monotonic() + 90
        condition = getattr(self, moment)()
        while not next(condition):
            if self._call.done():
                raise Failed(f"the call ended before {moment}: {outcome(self._call)}")
            if time.monotonic() > end:
                raise Failed(f"{moment} was not reached")
            time.sleep(0.01)

    def gpu_checkpoint(self):
        """The driver is copying GPU memory into the process."""
        while True:
            grown = any(status(pid, "RssAnon") > self._memory / 4 for pid in running(WORKLOAD))
            yield grown and running("firn-gpu")

    def criu_dump(self):
        """CRIU is writing or reading the image."""
        while not running("criu"):
            yield False
        time.sleep(INTO_CRIU)
        yield True

    criu_restore = criu_dump

    def driver_restore(self):
        """The driver is copying memory back onto the GPU: CRIU has come and gone."""
        while not running("criu"):
            yield False
        while running("criu"):
            yield False
        while True:
            yield running(WORKLOAD) and running("firn-gpu")


def outcome(call):
    """The error that the client got."""
    done = call.result()
    return f"exit status {done.returncode}: {done.stderr.strip()}"


def victims(program, name):
    """Whom to kill."""
    return shims(name) if program == "shim" else running(program)


def by_signs(gib):
    """How to wait for a moment: by what the machine shows of a counter with so many GiB."""
    return lambda call, moment: Moments(call, gib).reach(moment)


def killed(pool, record, reach, container, call, program, moment):
    """Run `call` and kill the program at the moment; the call must fail. Returns the client's error."""
    future = pool.submit(call)
    reach(future, moment)
    pids = victims(program, container.name)
    if not pids:
        raise Failed(f"no {program} to kill at {moment}; the client: {outcome(future)}")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    client = future.result()
    if client.returncode == 0:
        raise Failed(f"{program} was killed at {moment}, and the client got success")
    record.setdefault("kills", []).append(f"{program} at {moment}: {client.stderr.strip()[:200]}")
    return client.stderr.strip()


def nothing_runs(end):
    """No program of a transaction is left."""
    end.until("the transaction's programs to end", lambda: not any(map(running, PROGRAMS)), 30)


def goes_on(container, end, context):
    """The workload runs as before, with verified counts."""
    undisturbed(container, end, context)
    cases.wait_for_counts(container, end, 1, cases.counts(container), 2, context)


def undisturbed(container, end, context):
    """It runs, without a tracer, and nothing is left of the transaction."""
    if (state := container.status(end)) != "RUNNING":
        raise Failed(f"{container.name} is {state}; {context}")
    nothing_runs(end)
    traced = [pid for pid in container.pids(end) if status(pid, "TracerPid")]
    if traced:
        raise Failed(f"{traced} are still traced; {context}")


def is_gone(container, end, context):
    """Nothing of the container is left on the machine."""
    nothing_runs(end)
    end.until(f"the workload to be gone; {context}", lambda: not running(WORKLOAD), 30)
    end.until("its shim to be gone", lambda: not shims(container.name), 30)
    # Of a shim that was killed containerd hears only by and by.
    end.until("containerd to have cleaned up", lambda: not os.path.exists(container.bundle()), 30)
    cgroups = glob.glob(f"/sys/fs/cgroup/{NAMESPACE}/{container.name}") + glob.glob(f"/sys/fs/cgroup/*/{NAMESPACE}/{container.name}")
    if cgroups:
        raise Failed(f"cgroups are left: {cgroups}; {context}")
    cases.wait_for_free_gpus(end)


def kills(setup, end, record, gib):
    """Kill what takes part, at several moments of a checkpoint and of a restore."""
    source_gpus, target_gpus = setup.pick(1)
    workload = cases.counter(["--mib", f"{gib * 1024:.0f}"], gpus=1)
    source, target = Container(setup.host, "kills"), Container(setup.host, "kills-b")
    image = "firn.test/checkpoint/kills:latest"
    record.update(gib=gib, counters=1, uuid_before=source_gpus)
    pool, reach = concurrent.futures.ThreadPoolExecutor(1), by_signs(gib)
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(source_gpus))
        before = cases.wait_for_counts(source, end, 1, {}, 3)
        for program, moment in (("firn-gpu", "gpu_checkpoint"), ("criu", "criu_dump"), ("runc", "criu_dump")):
            message = killed(pool, record, reach, source, lambda: source.checkpoint(image, end), program, moment)
            goes_on(source, end, f"{program} was killed at {moment}: {message}")
        done = source.checkpoint(image, end)
        went_on = cases.wait_for_counts(source, end, 1, cases.counts(source), 2)
        if done.returncode:
            raise Failed(f"the checkpoint after the kills failed: {done.stderr.strip()}")
        for program, moment in (("shim", "criu_dump"),):
            lost = "firn.test/checkpoint/lost:latest"
            message = killed(pool, record, reach, source, lambda: source.checkpoint(lost, end), program, moment)
            is_gone(source, end, f"{program} was killed at {moment}: {message}")
        source.remove(end)

        cases.grant(setup, source_gpus, target_gpus)
        restore = ("containers", "restore", "--rw", "--live", target.name, image)
        for program, moment in (("criu", "criu_restore"), ("runc", "criu_restore"), ("firn-gpu", "driver_restore"),
                                ("shim", "driver_restore")):
            message = killed(pool, record, reach, target, lambda: setup.host.ctr(*restore, check=False, deadline=end, output=target.output),
                          program, moment)
            if program != "shim":
                # ctr leaves the task that could not be started.
                target.remove(end)
            is_gone(target, end, f"{program} was killed at {moment}: {message}")
            target.remove(end)
        target.restore(image, end)
        after = cases.wait_for_counts(target, end, 1, {}, 3, "restored")
        record["uuid_after"] = cases.check_holders(target, end, target_gpus, gib)
        record.update(cases.compare(before, went_on, after))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        cases.clean_up(setup, [source, target], image)


def kills_anywhere(setup, end, record, rounds, gib=4, longest=1.6):
    """Kill runc or CRIU at a random moment of a dump, `rounds` times; the counter continues each time."""
    gpus, _ = setup.pick(1)
    workload = cases.counter(["--mib", f"{gib * 1024:.0f}"], gpus=1)
    image = "firn.test/checkpoint/kills:latest"
    seed = int(time.time())
    record.update(gib=gib, counters=1, uuid_before=gpus, seed=seed, rounds=0, hit=0)
    chance = random.Random(seed)
    source = Container(setup.host, "kills-anywhere")
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(gpus))
        cases.wait_for_counts(source, end, 1, {}, 3)
        while record["rounds"] < rounds and end.left() > 40:
            record["rounds"] += 1
            program, into = chance.choice(("runc", "runc", "criu")), chance.uniform(0, longest)
            future = pool.submit(source.checkpoint, image, end)
            end.until("CRIU", lambda: running("criu") or future.done())
            time.sleep(into)
            # A dump that has ended by now is not hit.
            pids = running(program) if running("criu") else []
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            client = future.result()
            record["hit"] += bool(pids) and client.returncode != 0
            if client.returncode == 0:
                setup.host.remove_image(image, end)
            context = f"round {record['rounds']}: {program}, {into:.3f} s into the dump: {client.stderr.strip() or 'done'}"
            setup.log(context)
            undisturbed(source, end, context)
            counts = cases.counts(source)
            end.until(f"the counter or its end; {context}", lambda: source.has_ended() or has_more(source, counts))
            if source.has_ended():
                raise Failed(f"the workload ended with {source.exit_status(end, 5)}; {context}")
        if record["hit"] < record["rounds"] / 4:
            raise Failed(f"only {record['hit']} of {record['rounds']} dumps were hit")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        cases.clean_up(setup, [source], image)


def has_more(container, counts):
    """Whether each worker has printed a verified iteration beyond these."""
    now = cases.counts(container)
    return all(len(now[worker]) > len(counts[worker]) for worker in counts)
