"""The cases: each runs a container, freezes it, thaws it, and believes only what the workload itself prints.

`gpu-counter` verifies all of its memory at every iteration and ends at a mismatch, so that a line with the same checksum
for the same iteration, printed by the source (which runs on after a checkpoint) and by the restored container, shows
that the GPU's memory came back. Which GPU holds it is asked of nvidia-smi, because a process continues reporting the UUID
that it saw first.
"""

import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial

import cdi
import firn_cli
import host as hosts
from host import Container, Deadline, Failed

COUNTER_IMAGE = "firn.test/counter:latest"
OUTLINE_IMAGE = "firn.test/outline:latest"
# The busybox workload of the runs without a GPU.
CPU_COUNTER = "i=0; while :; do echo counter pid=1 iter=$i checksum=$((i * 7919 % 65537)) ok; i=$((i + 1)); sleep 0.1; done"

PYTHON_COUNTER = """
import itertools, time
for i in itertools.count():
    print(f"counter pid=1 iter={i} checksum={i * 7919 % 65537} ok", flush=True)
    time.sleep(0.1)
"""


@dataclass
class Setup:
    """What all cases share."""

    host: hosts.Host
    runtime: str
    gpus: list
    evidence: str
    log: callable

    def pick(self, count):
        """`count` GPUs to start on and as many to end on: others where the machine has them."""
        uuids = [gpu["uuid"] for gpu in self.gpus]
        return uuids[:count], (uuids[count : 2 * count] if len(uuids) >= 2 * count else uuids[:count])


@dataclass
class Case:
    """A case by name: its time limit, the GPUs that it needs, and its function of setup, deadline and record.

    The function fills the record as it goes, so that a failed case shows how far it came.
    """

    name: str
    seconds: int
    needs: int
    play: callable
    groups: tuple = field(default=())


# Trainings that fork children of a process with CUDA: data loaders, pools whose workers have children, and the compile
# workers of inductor. A fork server is a program of its own: what it forks has nothing of the GPU.
CHILDREN = {
    "workers": ("--workers", "2"),
    "forkserver": ("--workers", "2", "--start", "forkserver"),
    "pool": ("--pool", "4"),
    "compile": ("--compile", "default"),
    "graphs": ("--compile", "reduce-overhead"),
}


def all_cases(sizes, mib):
    """Every case with buffers of `mib` MiB, then those on `sizes` GiB, which take longest."""
    cpu = Workload(COUNTER_IMAGE, ["/bin/sh", "-c", CPU_COUNTER])

    def trip(name, workload, **kind):
        return lambda setup, end, record: round_trip(setup, end, record, name, workload, **kind)

    found = [
        Case("four", 90, 1, trip("four", sharing_nothing(
            counter(["--mib", f"{mib}", "--procs", "4"])), memory=4 * mib / 1024, workers=4)),
        Case("two-gpu", 90, 2, trip("two-gpu", without_peer_access(counter(["--mib", f"{mib}", "--gpu", "0,1"], 2)), memory=mib / 1024, workers=2)),
        Case("task-checkpoint", 60, 1, lambda setup, end, record: task_checkpoint(
            setup, end, record, "task", counter(["--mib", f"{mib}"]), mib / 1024)),
        Case("managed", 60, 1, managed),
        Case("grows", 90, 1, grows),
        Case("appends", 90, 1, trip("appends", writing(">>"), memory=0.5)),
        Case("ipc", 60, 1, ipc),
        Case("nccl", 180, 2, nccl),
        Case("torch", 180, 1, torch),
        *(Case(f"torch-{name}", 240, 1, partial(torch, name=f"torch-{name}", arguments=arguments), ("children", "jobs"))
          for name, arguments in CHILDREN.items()),
        Case("torch-managed", 180, 1, torch_managed),
        Case("cpu", 60, 0, trip("cpu", cpu), ("no-gpu",)),
        Case("cpu-python", 60, 0, trip("cpu-python", python(["-c", PYTHON_COUNTER])), ("no-gpu",)),
        Case("cpu-task-checkpoint", 60, 0, lambda setup, end, record: task_checkpoint(
            setup, end, record, "cpu-task", cpu), ("no-gpu",)),
    ]
    for size in sorted(sizes):
        workload = counter(["--mib", f"{size * 1024:.0f}"])
        found.append(Case(f"size-{size:g}", int(60 + 8 * size), 1, trip(f"size-{size:g}", workload, memory=size), ("sizes",)))
    return found


@dataclass
class Workload:
    """What a container runs: image, command, options of `ctr run`, kind of its CDI devices."""

    image: str
    argv: list
    options: list = field(default_factory=list)
    kind: str = cdi.KIND
    gpus: int = 0
    # Other names for the GPUs than their UUIDs.
    devices: list = None

    def ctr_options(self, uuids):
        """The options of `ctr run` that grant these GPUs."""
        return [*self.options, *(word for name in self.devices or uuids for word in ("--device", f"{self.kind}={name}"))]


def counter(arguments, gpus=1):
    """gpu-counter in the test image."""
    return Workload(COUNTER_IMAGE, ["/usr/bin/gpu-counter", *arguments], gpus=gpus)


def sharing_nothing(workload):
    """The same, with its owner's word that its processes share no GPU memory: several are refused otherwise."""
    return replace(workload, options=[*workload.options, "--annotation", "firn.dev/ipc=none"])


def without_peer_access(workload):
    """The same, with its owner's word that no GPU of a process accesses another one's memory."""
    return replace(workload, options=[*workload.options, "--annotation", "firn.dev/peer-access=none"])


def counts(container):
    """Verified iterations that a container has printed: checksum by iteration, by worker."""
    found = {}
    for line in container.lines():
        if not line.startswith("counter ") or not line.endswith(" ok"):
            continue
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        worker = tuple((key, fields[key]) for key in ("pid", "thread", "gpu") if key in fields)
        found.setdefault(worker, {})[int(fields["iter"])] = fields["checksum"]
    return found


def wait_for_counts(container, end, workers, beyond, more, context="started"):
    """Wait until each of `workers` has `more` iterations beyond those of `beyond`; return all counts."""

    def ready():
        now = counts(container)
        enough = all(len(now[worker]) >= len(beyond.get(worker, ())) + more for worker in now)
        return now if len(now) == workers and enough else None

    try:
        return end.until(f"{more} more iterations of {workers} workers in {container.name}", ready)
    except Failed as late:
        last = " / ".join(container.lines()[-3:]) or "nothing"
        raise Failed(f"{late}; {context}; it printed last: {last}") from late


def holders(pids):
    """GPU memory in MiB by UUID that these processes hold, as nvidia-smi shows it.

    Where it shows no processes at all (some virtual machines), the memory in use of each GPU: nobody else uses them.
    """
    processes = cdi.query("compute-apps", ["pid", "gpu_uuid", "used_memory"])
    if not all(row["used_memory"].isdigit() for row in processes) or not processes:
        return {row["uuid"]: int(row["memory.used"]) for row in cdi.query("gpu", ["uuid", "memory.used"])}
    held = {}
    for row in processes:
        if int(row["pid"]) in pids:
            held[row["gpu_uuid"]] = held.get(row["gpu_uuid"], 0) + int(row["used_memory"])
    return held


def wait_for_free_gpus(end):
    """Wait until no process holds GPU memory."""

    def free():
        busy = [row for row in cdi.query("gpu", ["memory.used"]) if int(row["memory.used"]) >= 512]
        return not busy and not cdi.query("compute-apps", ["pid"])

    end.until("the GPUs to be free", free, 30)


def check_holders(container, end, uuids, least):
    """The container's processes hold at least `least` GiB on each of these GPUs and on no other; returns them.

    A process of several GPUs has a context on each, so small amounts elsewhere prove nothing.
    """
    if not uuids:
        return []
    pids = container.pids(end)
    held = holders(pids)
    found = sorted(uuid for uuid, size in held.items() if size >= least * 1024)
    if found != sorted(uuids):
        raise Failed(f"{container.name}: {least:g} GiB expected on {uuids}, nvidia-smi shows {held} for {pids}")
    return uuids


def grant(setup, source, target):
    """Let firn give the restored container only `target`, where that differs from what the source had."""
    if source == target:
        setup.host.put(hosts.FIRN_CONFIG, None)
        return
    quoted = ", ".join(f'"{uuid}"' for uuid in target)
    setup.host.put(hosts.FIRN_CONFIG, f"[restore]\ngpus = [{quoted}]\n")


def timed(operation, *args):
    """Result and seconds of a call."""
    began = time.monotonic()
    result = operation(*args)
    return result, round(time.monotonic() - began, 3)


def round_trip(setup, end, record, name, workload, memory=0.0, workers=1, see=lambda container, end: None):
    """Run, checkpoint, see the source continue, remove it, restore (on another GPU where there is one), compare.

    `see` looks at the container before the checkpoint, after it, and after the restore.
    """
    source_gpus, target_gpus = setup.pick(workload.gpus)
    source, target = Container(setup.host, name), Container(setup.host, f"{name}-b")
    image = f"firn.test/checkpoint/{name}:latest"
    record.update(gib=memory, counters=workers, uuid_before=source_gpus)
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(source_gpus))
        before = wait_for_counts(source, end, workers, {}, 3)
        see(source, end)
        check_holders(source, end, source_gpus, memory)

        done, record["checkpoint_s"] = timed(source.checkpoint, image, end)
        record["checkpoint_ms"] = source.timings()
        went_on = wait_for_counts(source, end, workers, counts(source), 2, f"output of checkpoint: {done.stderr.strip() or 'done'}")
        if done.returncode:
            raise Failed(f"checkpoint failed (the workload continues): {done.stderr.strip()}")
        see(source, end)
        source.keep_evidence(setup.evidence)
        source.remove(end)
        if source_gpus:
            wait_for_free_gpus(end)

        grant(setup, source_gpus, target_gpus)
        _, record["restore_s"] = timed(target.restore, image, end)
        after = wait_for_counts(target, end, workers, {}, 3, "restored")
        see(target, end)
        record["restore_ms"] = target.timings()
        record["uuid_after"] = check_holders(target, end, target_gpus, memory)
        record.update(compare(before, went_on, after))
        target.keep_evidence(setup.evidence)
    finally:
        clean_up(setup, [source, target], image)


def compare(before, source, restored):
    """The restored counters continue where the frozen ones stood; returns what shows it.

    `source` was read after the checkpoint, while the source ran on: it holds the same iterations as `restored`.
    """
    shown = {}
    for worker, checksums in restored.items():
        first, last_before = min(checksums), max(before[worker])
        if first <= last_before:
            raise Failed(f"{worker}: began again at {first}, it had counted to {last_before} before the checkpoint")
        if first - 1 not in source[worker]:
            raise Failed(f"{worker}: continues at {first}, but the source had counted to {max(source[worker])} only")
        if sorted(checksums) != list(range(first, first + len(checksums))):
            raise Failed(f"{worker}: iterations are missing: {sorted(checksums)}")
        common = sorted(set(checksums) & set(source[worker]))
        if not common:
            raise Failed(f"{worker}: no iteration that both printed")
        for iteration in common:
            if checksums[iteration] != source[worker][iteration]:
                raise Failed(f"{worker}: checksum of {iteration} is {checksums[iteration]}, not {source[worker][iteration]}")
        shown = {
            "iter_before": last_before,
            "iter_after": first,
            "checksum_source": source[worker][common[0]],
            "checksum_restored": checksums[common[0]],
            "checksum_of_iter": common[0],
        }
    return shown


def clean_up(setup, containers, image=None, directories=()):
    """Remove what a case made; used on every way out of it."""
    failures = []
    # A case that overran its limit still gets the time to clean up.
    end = Deadline(60)
    for container in containers:
        try:
            container.keep_evidence(setup.evidence)
            container.remove(end)
        except Failed as error:
            failures.append(str(error))
    if image:
        setup.host.remove_image(image, end)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    setup.host.put(hosts.FIRN_CONFIG, None)
    if failures and sys.exc_info()[0] is None:
        raise Failed("; ".join(failures))


def task_checkpoint(setup, end, record, name, workload, memory=0.0):
    """`ctr task checkpoint` leaves the task running; with `--exit` it ends it and frees the GPU."""
    uuids, _ = setup.pick(workload.gpus)
    container = Container(setup.host, name)
    first, second = f"{setup.host.memory}/{name}-1", f"{setup.host.memory}/{name}-2"
    record.update(gib=memory, counters=1, uuid_before=uuids)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        wait_for_counts(container, end, 1, {}, 3)
        done, record["checkpoint_s"] = timed(container.checkpoint_task, first, end)
        if done.returncode:
            raise Failed(f"checkpoint failed: {done.stderr.strip()}")
        check_image(first, bool(uuids))
        seen = counts(container)
        went_on = wait_for_counts(container, end, 1, seen, 2)
        record["iter_before"], record["iter_after"] = (max(next(iter(found.values()))) for found in (seen, went_on))
        record["uuid_after"] = check_holders(container, end, uuids, memory)

        # ctr makes an image that it names by the second.
        this_second = int(time.time())
        end.until("the next second", lambda: int(time.time()) != this_second)
        done, record["exit_s"] = timed(container.checkpoint_task, second, end, False)
        if done.returncode:
            raise Failed(f"checkpoint with exit failed: {done.stderr.strip()}")
        check_image(second, bool(uuids))
        container.exit_status(end, 20)
        if uuids:
            wait_for_free_gpus(end)
    finally:
        clean_up(setup, [container], directories=[first, second])


def check_image(directory, gpu):
    """A finished CRIU image lies there, with firn's manifest if it holds GPU state."""
    for name in ("inventory.img", "pstree.img", *(["firn.json"] if gpu else [])):
        if not os.path.isfile(f"{directory}/{name}"):
            raise Failed(f"no {name} in the image directory: {sorted(os.listdir(directory))}")


def managed(setup, end, record):
    """Managed memory cannot be checkpointed: it is refused, and the counter continues unharmed."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "managed")
    workload = counter(["--mib", "64", "--managed"])
    record.update(gib=0.0625, counters=1, uuid_before=uuids)
    image = "firn.test/checkpoint/managed:latest"
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        wait_for_counts(container, end, 1, {}, 3)
        refuse(container, image, end, record)
        seen = counts(container)
        went_on = wait_for_counts(container, end, 1, seen, 3, f"refused: {record['refusal']}")
        record["iter_before"], record["iter_after"] = (max(next(iter(found.values()))) for found in (seen, went_on))
    finally:
        clean_up(setup, [container], image)


def writing(how):
    """gpu-counter next to a process that writes to a file all the time."""
    script = f"while :; do echo x; done {how}/log & exec /usr/bin/gpu-counter --mib 512"
    return Workload(COUNTER_IMAGE, ["/bin/sh", "-c", script], gpus=1)


def grows(setup, end, record):
    """A file that grows after ctr has copied it could not be opened in a copy: refused, and the counter continues."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "grows")
    workload = writing(">")
    record.update(gib=0.5, counters=1, uuid_before=uuids)
    image = "firn.test/checkpoint/grows:latest"
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        wait_for_counts(container, end, 1, {}, 3)
        refuse(container, image, end, record)
        if record["code"] != "FIRN-FILES":
            raise Failed(f"refused with another code: {record['refusal']}")
        seen = counts(container)
        wait_for_counts(container, end, 1, seen, 3, f"refused: {record['refusal']}")
    finally:
        clean_up(setup, [container], image)


def refuse(container, image, end, record, codes=None):
    """Ask for a checkpoint that must be refused; with `codes`, by one of them and before the driver is asked for anything."""
    done, record["checkpoint_s"] = timed(container.checkpoint, image, end)
    record["refusal"] = done.stderr.strip()
    record["code"] = refusal(done, codes, container.timings())


def refusal(done, codes, timings):
    """The code by which a checkpoint was refused; anything else is a failure."""
    message = done.stderr.strip()
    if not done.returncode:
        raise Failed("the checkpoint succeeded")
    code = re.search(r"FIRN-[A-Z0-9-]+", message)
    if not code:
        raise Failed(f"refused without a FIRN code: {message}")
    if codes and code[0] not in codes:
        raise Failed(f"refused with {code[0]}, not {' or '.join(codes)}: {message}")
    if codes and "gpu-lock" in timings:
        raise Failed(f"refused after the lock ({timings}): {message}")
    return code[0]


def ipc(setup, end, record):
    """Memory that two processes share by cudaIpc shows no sign, and could not be restored: refused, and both continue."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "ipc")
    workload = counter(["--mib", "64", "--ipc"])
    record.update(gib=0.0625, counters=2, uuid_before=uuids)
    image = "firn.test/checkpoint/ipc:latest"
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        wait_for_counts(container, end, 1, {}, 3)
        wait_for_imports(container, end, 3)
        refuse(container, image, end, record, ["FIRN-IPC"])
        seen, imported = counts(container), imports(container)
        went_on = wait_for_counts(container, end, 1, seen, 3, f"refused: {record['refusal']}")
        wait_for_imports(container, end, imported + 3)
        record["iter_before"], record["iter_after"] = (max(next(iter(found.values()))) for found in (seen, went_on))
    finally:
        clean_up(setup, [container], image)


def imports(container):
    """How often the process that imported the other's memory has read it."""
    return sum(line.startswith("importer ") and line.endswith(" ok") for line in container.lines())


def wait_for_imports(container, end, number):
    """Wait until the importer has read so often."""
    end.until(f"{number} reads of shared memory", lambda: imports(container) >= number)


def nccl(setup, end, record):
    """Two ranks of NCCL with its default transport may share GPU memory: refused by audit and checkpoint, and they train on."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:2]
    container = Container(setup.host, "nccl")
    # The default size of /dev/shm is small for NCCL.
    shm = ["--mount", "type=tmpfs,src=shm,dst=/dev/shm,options=mode=1777:size=1g"]
    workload = script(setup, "ddp.py", [], 2, shm)
    record.update(gib=0.1, counters=2, uuid_before=uuids)
    image = "firn.test/checkpoint/nccl:latest"
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        end.until("the ranks to train", lambda: reached(container, 3), 120)
        audited = firn_cli.audit(setup, container, end)
        record["audit"] = audited.verdict
        firn_cli.must_refuse(audited, ["FIRN-NCCL", "FIRN-IPC"])
        refuse(container, image, end, record, ["FIRN-NCCL", "FIRN-IPC"])
        # A step ends when both ranks have summed their gradients: one that hangs holds the other.
        record["iter_before"] = max(losses(container.lines()))
        record["iter_after"] = record["iter_before"] + 5
        end.until("the ranks to train on", lambda: reached(container, record["iter_after"]), 60)
    finally:
        clean_up(setup, [container], image)


def torch(setup, end, record, steps=80, interrupt_at=20, name="torch", arguments=(), options=(), see=lambda container, end: None):
    """A training loop prints the same losses whether it is moved in between or not.

    `see` looks at the container before the checkpoint, after it, and after the restore.
    """
    reference = losses(play_out(setup, end, f"{name}-reference", steps, arguments))
    if sorted(reference) != list(range(steps)):
        raise Failed(f"the uninterrupted run printed {len(reference)} of {steps} losses")

    source_gpus, target_gpus = setup.pick(1)
    source, target = Container(setup.host, name), Container(setup.host, f"{name}-b")
    workload = training(setup, steps, arguments)
    workload.options = [*workload.options, *options]
    image = f"firn.test/checkpoint/{name}:latest"
    record.update(gib=0.1, counters=1, uuid_before=source_gpus)
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(source_gpus))
        before = end.until("the training to reach the step", lambda: reached(source, interrupt_at), 90)
        check_holders(source, end, source_gpus, record["gib"])
        see(source, end)
        checkpointed(setup, source, image, end, record)
        # The source's own next losses show where it stood when it was frozen.
        next_step = max(losses(source.lines())) + 2
        end.until("the source to continue", lambda: reached(source, next_step))
        see(source, end)
        source.keep_evidence(setup.evidence)
        source.remove(end)
        went_on = losses(source.lines())

        grant(setup, source_gpus, target_gpus)
        _, record["restore_s"] = timed(target.restore, image, end)
        end.until("the restored training to print", lambda: losses(target.lines()))
        see(target, end)
        record["restore_ms"] = target.timings()
        record["uuid_after"] = check_holders(target, end, target_gpus, record["gib"])
        status = target.exit_status(end, 90)
        after = losses(target.lines())
        if status or target.lines()[-1:] != ["done"]:
            raise Failed(f"the restored training ended with {status}: {' / '.join(target.lines()[-3:])}")
        record.update(compare_losses(reference, before, went_on, after))
    finally:
        clean_up(setup, [source, target], image)


def checkpointed(setup, source, image, end, record):
    """Checkpoint a job that the audit does not refuse."""
    audited = firn_cli.audit(setup, source, end)
    record["audit"] = audited.verdict
    if audited.verdict == "cannot":
        raise Failed(f"the audit refuses the job: {audited.codes}")
    done, record["checkpoint_s"] = timed(source.checkpoint, image, end)
    record["checkpoint_ms"] = source.timings()
    if done.returncode:
        raise Failed(f"checkpoint failed: {done.stderr.strip()}")


def compare_losses(reference, before, source, restored):
    """The restored training continues where the source was frozen, with the losses of the uninterrupted run; returns what shows it."""
    steps, first = len(reference), min(restored)
    if first <= max(before) or first - 1 not in source or sorted(restored) != list(range(first, steps)):
        raise Failed(f"restored at step {first} of {max(before)} to {max(source)}, printed {sorted(restored)}")
    for run, seen in (("source", source), ("restored", restored)):
        wrong = [step for step, loss in seen.items() if loss != reference[step]]
        if wrong:
            raise Failed(f"{run}: loss {seen[wrong[0]]} at step {wrong[0]}, uninterrupted {reference[wrong[0]]}")
    return {
        "iter_before": max(before), "iter_after": first, "checksum_source": reference[steps - 1],
        "checksum_restored": restored[steps - 1], "checksum_of_iter": steps - 1, "losses_equal": len(restored),
    }


def torch_managed(setup, end, record, steps=60, interrupt_at=10):
    """A training that holds managed memory is refused, and prints the losses of an uninterrupted run."""
    reference = losses(play_out(setup, end, "torch-managed-reference", steps))
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "torch-managed")
    workload = training(setup, steps, ["--managed-mib", "4"])
    image = "firn.test/checkpoint/torch-managed:latest"
    record.update(gib=0.1, counters=1, uuid_before=uuids)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        end.until("the training to reach the step", lambda: reached(container, interrupt_at), 90)
        refuse(container, image, end, record, ["FIRN-UVM"])
        record["iter_before"] = max(losses(container.lines()))
        status = container.exit_status(end, 90)
        after = losses(container.lines())
        if status or after != reference or sorted(after) != list(range(steps)):
            raise Failed(f"refused at step {record['iter_before']}, ended with {status}: {' / '.join(container.lines()[-3:])}")
        record.update(iter_after=steps - 1, losses_equal=len(after))
    finally:
        clean_up(setup, [container], image)


def play_out(setup, end, name, steps, arguments=()):
    """Run the training without interruption; returns what it printed."""
    container = Container(setup.host, name)
    workload = training(setup, steps, arguments)
    uuids, _ = setup.pick(1)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        status = container.exit_status(end, 120)
        if status:
            raise Failed(f"the uninterrupted training ended with {status}: {' / '.join(container.lines()[-5:])}")
        return container.lines()
    finally:
        clean_up(setup, [container])


def reached(container, step):
    """The losses, once `step` is among them."""
    found = losses(container.lines())
    return found if step in found else None


def losses(lines):
    """Loss by step."""
    found = (re.fullmatch(r"step=(\d+) loss=(\S+)", line) for line in lines)
    return {int(match[1]): match[2] for match in found if match}


def training(setup, steps, arguments=()):
    """train.py with the machine's Python and PyTorch."""
    return script(setup, "train.py", ["--steps", str(steps), *arguments], 1)


def script(setup, name, arguments, gpus, options=()):
    """A script of this directory, with the machine's Python and PyTorch."""
    here = os.path.dirname(os.path.abspath(__file__))
    files = [os.path.join(here, needed) for needed in (name, "ddp.py")]
    return scripts(setup, "train", files, [f"/train/{name}", *arguments], gpus, options)


def scripts(setup, place, files, command, gpus, options=()):
    """The machine's Python with these files in the directory `place` at the root."""
    directory = f"{setup.host.work}/{place}"
    os.makedirs(directory, exist_ok=True)
    for file in files:
        shutil.copy(file, directory)
    mount = [*options, "--mount", f"type=bind,src={directory},dst=/{place},options=bind:ro"]
    if not cdi.known_to_loader():
        mount += ["--env", f"LD_LIBRARY_PATH={cdi.library_dir()}"]
    return python(command, mount, gpus=gpus)


def python(arguments, options=(), gpus=0):
    """The machine's Python: the machine's directories, read-only, in an empty root."""
    found = [*options]
    for path in machine_directories():
        found += ["--mount", f"type=bind,src={path},dst={path},options=bind:ro"]
    for setting in ("HOME=/root", "USER=root", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=2"):
        found += ["--env", setting]
    return Workload(OUTLINE_IMAGE, [sys.executable, *arguments], found, cdi.NODES_KIND, gpus)


def machine_directories():
    """Directories that Python and PyTorch live in, and what is mounted below them, parents first.

    Each mount gets a bind of its own: CRIU knows the mounts that the spec names, and no others.
    """
    tops = {"/usr", "/opt", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64"}
    for path in (os.path.realpath(sys.executable), sys.prefix, sys.base_prefix):
        tops.add("/" + path.split("/")[1])
    found = [top for top in sorted(tops) if os.path.isdir(top) and not os.path.islink(top)]
    below = {point for top in found for point in hosts.mounts_below(top) if point != top}
    return found + sorted(point for point in below if os.path.isdir(point))
