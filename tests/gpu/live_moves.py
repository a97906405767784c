"""Moves of running containers to other GPUs of the machine: how long the workload stood still, and what it computes."""

import re

import cases
import hook_cases
import job_cases
import kills
import moves
import patient
import pauses
import ranks
import slices
from cases import Case
from host import NAMESPACE, Container, Failed

# The workload's lines, each with its time in seconds since the boot: the shell needs no program for that.
STAMPED = "%s | while read -r line; do read -r now rest </proc/uptime; echo \"counter at=$now ${line#counter }\"; done"


def all_cases(args):
    """Those of the group `pauses` that need several GPUs; `args` are those of run.py."""
    sizes = pauses.sizes(args)
    return [
        Case("live-moves", 400, 2, lambda setup, end, record: there_and_back(setup, end, record, sizes), ("pauses",)),
        Case("move-training", 240, 2, training, ("pauses",)),
        Case("move-ranks", 300, 4, ranked, ("pauses",)),
    ]


def move(container, gpus, end):
    """`firn move-gpu`, which must succeed; returns its seconds and the shim's timings."""
    host = container.host
    command = ["firn", "move-gpu", container.name, "--gpus", gpus, "--namespace", NAMESPACE, "--address", f"{host.work}/containerd.sock"]
    _, seconds = cases.timed(lambda: host.run(*command, deadline=end))
    return seconds, container.timings()


def there_and_back(setup, end, record, sizes):
    """A running container goes to another GPU and comes back; how long it stood still, its own time stamps show."""
    rows = record["moves"] = []
    for gib in pauses.fitting(setup, record, sizes):
        rows += moved(setup, end, record, gib)
        record["table"] = table(rows)


def moved(setup, end, record, gib):
    """One size to its two rows."""
    home, away = (gpu["uuid"] for gpu in setup.gpus[:2])
    container = Container(setup.host, f"live-{gib:g}")
    patient.grow_memory(gib, end)
    rows = []
    record.update(uuid_before=[home])
    try:
        workload = pauses.counter(["--mib", f"{gib * 1024:.0f}", "--interval-ms", "10"], ())
        workload.argv = ["/bin/sh", "-c", STAMPED % " ".join(workload.argv)]
        pauses.begun(setup, container, workload, [home], end)
        for left, target in ((home, away), (away, home)):
            idle, before = pauses.used(target), len(stamps(container.lines()))
            seconds, timings = move(container, target, end)
            kills.goes_on(container, end, f"moved to {target}")
            record["uuid_after"] = cases.check_holders(container, end, [target], gib)
            rows.append({
                "gib": gib, "to": target, "client_s": seconds, "driver_s": pauses.driver_s(timings),
                "shim_s": round(timings["total"] / 1000, 3), "idle_mib": idle, "target_mib": pauses.used(target), "left_mib": pauses.used(left),
                "down_s": downtime(stamps(container.lines()), before), "move_ms": timings,
            })
        patient.went_on(container, record)
    finally:
        cases.clean_up(setup, [container])
    return rows


def stamps(lines):
    """Seconds at which the workload has printed a line."""
    return [float(found[1]) for found in (re.match(r"counter at=([\d.]+) ", line) for line in lines) if found]


def downtime(printed, before):
    """The longest time between two lines, from the last of `before` lines on, less what is usual between those."""
    gaps = [after - first for first, after in zip(printed, printed[1:])]
    usual, since = sorted(gaps[: before - 1]), gaps[before - 1 :]
    if before < 2 or not since:
        raise Failed(f"{len(printed)} time stamps are too few, {before} of them before")
    return round(max(since) - usual[len(usual) // 2], 2)


def table(rows):
    """The moves for people."""
    lines = ["Moves of running containers; the workload's own time stamps show how long it stood still (to 0.01 s):", "",
             "| GiB | to | stood still s | of it the driver s | in the shim s | client s | target MiB before | after | former GPU MiB |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row['gib']:g}", row["to"][:12], row["down_s"], row["driver_s"], row["shim_s"], row["client_s"], row["idle_mib"],
                 row["target_mib"], row["left_mib"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def training(setup, end, record, steps=80, at=(10, 25, 40, 55)):
    """A training is moved while it trains, four times, and prints the losses of an uninterrupted run."""
    home, away = (gpu["uuid"] for gpu in setup.gpus[:2])
    reference = slices.play_out(setup, end, ["--pause", "0"], steps)
    container, spent = Container(setup.host, "move-training"), []
    workload = slices.training(setup, ["--steps", f"{steps}", "--pause", "0.2"])
    record.update(gib=0.1, counters=1, uuid_before=[home])
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options([home]))
        for step, target in zip(at, (away, home) * 2):
            end.until(f"step {step}", lambda: job_cases.reached(container, step), 120)
            spent.append(move(container, target, end)[0])
            last = max(cases.losses(container.lines()))
            end.until("the training to continue", lambda: job_cases.reached(container, last + 2), 60)
            record["uuid_after"] = cases.check_holders(container, end, [target], 0.1)
        ended(container, end)
        found = cases.losses(container.lines())
        slices.same_losses(reference, found)
        record.update(move_s=spent, losses_equal=len(found), iter_before=0, iter_after=max(found))
        record["table"] = [f"move-training: {len(spent)} moves of {', '.join(f'{seconds:.2f}' for seconds in spent)} s, "
                           f"{len(found)} losses equal to an uninterrupted run"]
    finally:
        cases.clean_up(setup, [container])


def ended(container, end):
    """The job has come to its end."""
    status = container.exit_status(end, 120)
    if status or "done" not in container.lines():
        raise Failed(f"{container.name} ended with {status}: {' / '.join(container.lines()[-3:])}")


def ranked(setup, end, record, count=4):
    """Ranks that release their process group in hooks are moved while they run, each to the next one's GPU."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:count]
    partners = moves.rotation(uuids)
    workload = hook_cases.job(setup, count, ["--steps", f"{ranks.STEPS}"])
    container = Container(setup.host, "move-ranks")
    record.update(gib=0.1, counters=count, uuid_before=uuids, map=partners)
    reference = cases.losses(ranks.play_out(setup, end, "move-ranks-reference", workload, uuids))
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        end.until("the ranks to reach the step", lambda: job_cases.reached(container, 20), 120)
        placed = moves.placement(container, end)
        pairs = ",".join(f"{old}={new}" for old, new in partners.items())
        record["move_s"], record["move_ms"] = move(container, pairs, end)
        moved_at = max(cases.losses(container.lines()))
        end.until("the ranks to continue", lambda: job_cases.reached(container, moved_at + 3), 60)
        moves.check_moved(placed, moves.placement(container, end), partners)
        record["uuid_after"] = [partners[uuid] for uuid in uuids]
        ended(container, end)
        found = cases.losses(container.lines())
        slices.same_losses(reference, found)
        record["losses_equal"] = len(found)
        hook_cases.check_rates(record, *by_group(container.lines()))
    finally:
        cases.clean_up(setup, [container])


def by_group(lines):
    """The lines of the ranks' first process group, and all others."""
    first = [line for line in lines if line.startswith("join=0 ")]
    return first, [line for line in lines if line not in first]
