"""What loses a job on a real driver or a real disk: refused before anything is touched, or rolled back.

The driver restores no process in which a GPU may access another GPU's allocations of 512 MiB and more: `pipeline` is such
a training, and `pipeline-host` one that copies through the host instead and asserts that. With firn's library
(`--interpose`) it exchanges its GPUs while it runs: `pipeline-moved`. A file system that takes all
that is written, and loses it when it reaches the device, must not cost a job that ends with its checkpoint: `failing-disk`.
"""

import contextlib
import os
import subprocess

import cases
import firn_cli
import live_moves
import moves
from cases import Case
from host import Container, Failed

STEPS = 60
INTERRUPT_AT = 10
NO_PEER_ACCESS = ["--annotation", "firn.dev/peer-access=none"]


def all_cases(args):
    """The cases; the failing disk gets a process of `args.failing_gib` GiB."""
    return [
        Case("pipeline", 180, 2, pipeline, ("traps",)),
        Case("pipeline-host", 240, 2, through_the_host, ("traps",)),
        Case("pipeline-moved", 180, 2, moved, ("traps", "asked-for")),
        Case("failing-disk", int(120 + 5 * args.failing_gib), 1, lambda setup, end, record: failing_disk(
            setup, end, record, args.failing_gib), ("traps", "asked-for")),
    ]


def training(setup, through, options=()):
    """A model whose halves are on two GPUs, with 1 GiB of other tensors on each."""
    return cases.script(setup, "pipeline.py", ["--steps", str(STEPS), "--through", through], 2, options)


def reference(setup, end, name, through, uuids):
    """The losses of an uninterrupted run."""
    container = Container(setup.host, f"{name}-reference")
    workload = training(setup, through)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        return played_out(container, end)
    finally:
        cases.clean_up(setup, [container])


def played_out(container, end):
    """The losses of a training that has come to its end."""
    status = container.exit_status(end, 120)
    found = cases.losses(container.lines())
    if status or container.lines()[-1:] != ["done"] or sorted(found)[-1:] != [STEPS - 1]:
        raise Failed(f"{container.name} ended with {status}: {' / '.join(container.lines()[-3:])}")
    return found


def pipeline(setup, end, record):
    """Audit and checkpoint refuse it before the lock, and its losses are those of an uninterrupted run."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:2]
    expected = reference(setup, end, "pipeline", "peer", uuids)
    container = Container(setup.host, "pipeline")
    workload = training(setup, "peer")
    image = "firn.test/checkpoint/pipeline:latest"
    record.update(gib=2, counters=1, uuid_before=uuids)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        end.until("the training to reach the step", lambda: cases.reached(container, INTERRUPT_AT), 90)
        audited = firn_cli.audit(setup, container, end)
        record["audit"] = audited.verdict
        firn_cli.must_refuse(audited, ["FIRN-PEER"])
        cases.refuse(container, image, end, record, ["FIRN-PEER"])
        record["iter_before"] = max(cases.losses(container.lines()))
        found = played_out(container, end)
        if found != expected:
            raise Failed(f"after a refusal at step {record['iter_before']} the losses differ: {compare(expected, found)}")
        record.update(iter_after=STEPS - 1, losses_equal=len(found))
    finally:
        cases.clean_up(setup, [container], image)


def moved(setup, end, record):
    """With firn's library it exchanges its GPUs twice while it trains, and its losses are those of an uninterrupted run."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:2]
    expected = reference(setup, end, "pipeline-moved", "peer", uuids)
    container = Container(setup.host, "pipeline-moved")
    workload = training(setup, "peer")
    pairs = ",".join(f"{old}={new}" for old, new in moves.rotation(uuids).items())
    spent = []
    record.update(gib=2, counters=1, uuid_before=uuids)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        for step in (INTERRUPT_AT, 2 * INTERRUPT_AT):
            end.until(f"step {step}", lambda: cases.reached(container, step), 90)
            seconds, timings = live_moves.move(container, pairs, end)
            spent.append(seconds)
            if "gpu-attach" not in timings:
                raise Failed(f"the library took nothing out: {timings}")
        record["move_ms"] = timings
        found = played_out(container, end)
        if found != expected:
            raise Failed(f"after {len(spent)} moves the losses differ: {compare(expected, found)}")
        record.update(move_s=spent, iter_before=INTERRUPT_AT, iter_after=STEPS - 1, losses_equal=len(found), uuid_after=uuids[::-1])
        record["table"] = [f"pipeline-moved: moves of {', '.join(f'{seconds:.2f}' for seconds in spent)} s, losses equal"]
    finally:
        cases.clean_up(setup, [container])


def compare(expected, found):
    """The first step whose losses differ."""
    return next((f"step {step}: {found.get(step)}, not {loss}" for step, loss in expected.items() if found.get(step) != loss), "none")


def through_the_host(setup, end, record):
    """The same training without peer access, which asserts that: restored with its GPUs exchanged, with equal losses."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:2]
    expected = reference(setup, end, "pipeline-host", "host", uuids)
    source, copy = Container(setup.host, "pipeline-host"), Container(setup.host, "pipeline-host-b")
    workload = training(setup, "host", NO_PEER_ACCESS)
    image = "firn.test/checkpoint/pipeline-host:latest"
    record.update(gib=2, counters=1, uuid_before=uuids)
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        before = end.until("the training to reach the step", lambda: cases.reached(source, INTERRUPT_AT), 90)
        cases.checkpointed(setup, source, image, end, record)
        next_step = min(STEPS - 1, max(cases.losses(source.lines())) + 2)
        end.until("the source to continue", lambda: cases.reached(source, next_step))
        source.keep_evidence(setup.evidence)
        source.remove(end)
        went_on = cases.losses(source.lines())

        moves.write_map(setup, moves.rotation(uuids))
        _, record["restore_s"] = cases.timed(copy.restore, image, end)
        record["restore_ms"] = copy.timings()
        after = played_out(copy, end)
        record.update(cases.compare_losses(expected, before, went_on, after), uuid_after=uuids[::-1])
    finally:
        cases.clean_up(setup, [source, copy], image)


@contextlib.contextmanager
def disk_without_room(directory, gib):
    """A file system of `gib` GiB on a device that has room for a quarter of that: it fails when it writes back."""
    back, point = f"{directory}/back", f"{directory}/mnt"
    os.makedirs(back)
    os.makedirs(point)
    device = None
    try:
        command("mount", "-t", "tmpfs", "-o", f"size={gib * 1024 // 4:.0f}m", "firn-gpu", back)
        command("truncate", "-s", f"{gib * 1024:.0f}M", f"{back}/disk")
        command("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,nodiscard", f"{back}/disk")
        device = command("losetup", "--find", "--show", f"{back}/disk").strip()
        command("mount", device, point)
        yield point
    finally:
        for words in (("umount", "-l", point), *((("losetup", "-d", device),) if device else ()), ("umount", "-l", back)):
            subprocess.run(words, check=False, capture_output=True)


def command(*words):
    """Run a program that must succeed; returns its output."""
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def failing_disk(setup, end, record, gib):
    """`--exit` onto a disk that takes the image and loses it: the job continues, and no image is left that looks whole."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, "failing-disk")
    workload = cases.counter(["--mib", f"{gib * 1024:.0f}"])
    record.update(gib=gib, counters=1, uuid_before=uuids)
    with disk_without_room(f"{setup.host.work}/failing-disk", gib * 1.25 + 4) as point:
        image = f"{point}/image"
        try:
            container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
            cases.wait_for_counts(container, end, 1, {}, 3)
            done, record["checkpoint_s"] = cases.timed(container.checkpoint_task, image, end, False)
            record["checkpoint_ms"] = container.timings()
            record["refusal"] = done.stderr.strip()
            seen = cases.counts(container)
            went_on = cases.wait_for_counts(container, end, 1, seen, 3, f"output of checkpoint: {record['refusal'] or 'done'}")
            if not done.returncode:
                raise Failed("the checkpoint succeeded")
            record["code"] = cases.refusal(done, None, {})
            if os.path.exists(f"{image}/firn.json"):
                raise Failed(f"an image with a manifest is left: {sorted(os.listdir(image))}")
            record["iter_before"], record["iter_after"] = (max(next(iter(found.values()))) for found in (seen, went_on))
        finally:
            cases.clean_up(setup, [container])
