"""Jobs of NCCL over sockets: trainings that are moved with their GPUs in other places, and what the sockets cost."""

import re

import cases
import moves
from cases import Case
from host import Container, Failed

# As much as NCCL wants; with the annotation it is firn that gives it.
SHM = ["--mount", "type=tmpfs,src=shm,dst=/dev/shm,options=mode=1777:size=1g"]
STEPS = 80


def all_cases():
    """The trainings of two and of four ranks, and the measurement."""
    found = []
    for count, name in ((2, "ddp-sockets"), (4, "ddp-sockets-4")):
        found.append(Case(name, 300, count, training(name, count), ("ddp",)))
    for count, name in ((2, "bandwidth"), (4, "bandwidth-4")):
        found.append(Case(name, 180, count, measuring(name, count), ("bandwidths",)))
    return found


def training(name, count):
    """The case of a training with so many ranks."""
    return lambda setup, end, record: ddp(setup, end, record, name, count)


def measuring(name, count):
    """The case of a measurement with so many ranks."""
    return lambda setup, end, record: bandwidth(setup, end, record, name, count)


def ddp(setup, end, record, name, count):
    """A training over sockets, whose ranks' GPUs change places."""
    workload = cases.script(setup, "ddp.py", ["--ranks", f"{count}", "--steps", f"{STEPS}"], count, moves.SOCKETS)
    moved(setup, end, record, name, workload, moves.rotation([gpu["uuid"] for gpu in setup.gpus][:count]))


def moved(setup, end, record, name, workload, partners):
    """A training prints the losses of an uninterrupted run, though each GPU becomes its partner in between.

    Returns the lines of the source and of the copy.
    """
    uuids = list(partners)
    source, target = Container(setup.host, name), Container(setup.host, f"{name}-b")
    image = f"firn.test/checkpoint/{name}:latest"
    record.update(gib=0.1, counters=len(uuids), uuid_before=uuids, map=partners)
    reference = cases.losses(play_out(setup, end, f"{name}-reference", workload, uuids))
    if sorted(reference) != list(range(STEPS)):
        raise Failed(f"the uninterrupted run printed {len(reference)} of {STEPS} losses")
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        before = end.until("the ranks to reach the step", lambda: cases.reached(source, 20), 120)
        placed = moves.placement(source, end)
        cases.checkpointed(setup, source, image, end, record)
        next_step = max(cases.losses(source.lines())) + 2
        end.until("the source to continue", lambda: cases.reached(source, next_step))
        source.keep_evidence(setup.evidence)
        source.remove(end)
        went_on = cases.losses(source.lines())
        cases.wait_for_free_gpus(end)

        moves.write_map(setup, partners)
        _, record["restore_s"] = cases.timed(target.restore, image, end)
        end.until("the restored ranks to train", lambda: cases.losses(target.lines()))
        record["restore_ms"] = target.timings()
        moves.check_moved(placed, moves.placement(target, end), partners)
        record["uuid_after"] = [partners[uuid] for uuid in uuids]
        status = target.exit_status(end, 90)
        if status or "done" not in target.lines():
            raise Failed(f"the restored training ended with {status}: {' / '.join(target.lines()[-3:])}")
        record.update(cases.compare_losses(reference, before, went_on, cases.losses(target.lines())))
        return source.lines(), target.lines()
    finally:
        cases.clean_up(setup, [source, target], image)


def play_out(setup, end, name, workload, uuids):
    """Run a job to its end; returns what it printed."""
    container = Container(setup.host, name)
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        status = container.exit_status(end, 150)
        if status:
            raise Failed(f"{name} ended with {status}: {' / '.join(container.lines()[-5:])}")
        return container.lines()
    finally:
        cases.clean_up(setup, [container])


def bandwidth(setup, end, record, name, count):
    """Measure all_reduce with NCCL's own choice of transport, and over sockets. Nothing is judged but that both ran."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:count]
    record.update(counters=count, uuid_before=uuids)
    measured = {}
    for transport, options in (("default", SHM), ("sockets", moves.SOCKETS)):
        workload = cases.script(setup, "bandwidth.py", ["--ranks", f"{count}"], count, options)
        lines = play_out(setup, end, f"{name}-{transport}", workload, uuids)
        measured[transport] = rates(lines)
        if not measured[transport]:
            raise Failed(f"{transport}: no rate in {' / '.join(lines[-5:])}")
    record["bandwidth"] = measured
    record["table"] = table(count, measured)


def rates(lines):
    """GB/s by MiB, as bandwidth.py prints them."""
    found = (re.fullmatch(r"all_reduce mib=(\d+) gbps=([\d.]+)", line) for line in lines)
    return {int(match[1]): float(match[2]) for match in found if match}


def table(count, measured):
    """The rates for people."""
    lines = [f"all_reduce of {count} ranks, GB/s on the bus:", "", f"| MiB | {' | '.join(measured)} |", "|---" * (len(measured) + 1) + "|"]
    for size in sorted(measured["default"]):
        lines.append(f"| {size} | {' | '.join(f'{rates.get(size, 0):g}' for rates in measured.values())} |")
    return lines
