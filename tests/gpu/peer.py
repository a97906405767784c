"""firn next to the peer, in one run on one machine: the stock shim with CRIU's plugin for CUDA and NVIDIA's cuda-checkpoint.

Neither is in the bundle. `--peer` names a directory with cuda_plugin.so, built from CRIU's source of the version in the
bundle, and the program cuda-checkpoint.
"""

import os
import shutil
import statistics
from functools import partial

import cases
import host as hosts
from cases import Case
from host import Container, Failed

STOCK = "io.containerd.runc.v2"
PLUGIN, PROGRAM = "cuda_plugin.so", "cuda-checkpoint"


def all_cases(args):
    """A case for each size."""
    sizes = [float(size) for size in args.peer_gib.split(",")]
    chosen = args.peer_ways.split(",") if args.peer_ways else list(ways(""))
    found = [
        Case(f"peer-{size:g}", 560, 1,
             partial(compared, gib=size, directory=args.peer, rounds=args.peer_rounds, chosen=chosen), ("peer", "asked-for"))
        for size in sizes
    ]
    return found + [Case(f"second-{size:g}", 240, 1, partial(second, gib=size), ("peer", "asked-for")) for size in sizes]


def ways(store):
    """Who makes the checkpoint, and firn's configuration for it: none for the stock shim with CRIU's plugin."""
    images = f'[images]\nbulk = "store"\nstore = "{store}"\n'
    return {
        "stock": None,
        "image": "",
        "store": images,
        "store-huge": images + '[checkpoint]\nhuge-pages = "while-copying"\n',
    }


def compared(setup, end, record, gib, directory, rounds, chosen):
    """Each way in turns; every copy continues where its source was, with its checksums."""
    if not directory or not all(os.path.exists(f"{directory}/{name}") for name in (PLUGIN, PROGRAM)):
        raise Failed(f"needs --peer with a directory that has {PLUGIN} and {PROGRAM}")
    # CRIU's plugin looks for the program in PATH.
    program = shutil.copy(f"{directory}/{PROGRAM}", f"{hosts.INSTALL_DIR}/bin/{PROGRAM}")
    store = mounted(setup, gib, end)
    taken, seen = {}, {}
    try:
        for number in range(rounds):
            for way in chosen:
                configuration, seen[way] = ways(store)[way], {}
                trip = moved(setup, end, f"peer-{number}-{way}", gib, configuration, os.path.abspath(directory), seen[way])
                taken.setdefault(way, []).append(trip)
                # Else the next checkpoint finds what it would copy.
                for name in os.listdir(store):
                    shutil.rmtree(f"{store}/{name}") if os.path.isdir(f"{store}/{name}") else os.unlink(f"{store}/{name}")
                setup.log(f"{gib:g} GiB, {way}: checkpoint {trip[0]} s, restore {trip[1]} s")
    finally:
        record.update(gib=gib, counters=1, taken=taken, seen=seen, table=table(gib, taken, seen))
        os.unlink(program)
        unmount(setup, store)


def mounted(setup, gib, end):
    """A store on a tmpfs of huge pages, with room for two copies."""
    store = f"{setup.host.work}/store"
    os.makedirs(store)
    setup.host.run("mount", "-t", "tmpfs", "-o", f"size={2 * gib + 2:.0f}g,huge=always", "store", store, deadline=end)
    return store


def unmount(setup, store):
    """End the store."""
    setup.host.run("umount", "-l", store, deadline=hosts.Deadline(20))
    os.rmdir(store)


def moved(setup, end, name, gib, configuration, plugin, seen):
    """Checkpoint by ctr, restore by ctr; returns the seconds of both."""
    is_stock = configuration is None
    uuids, _ = setup.pick(1)
    source, copy = Container(setup.host, name), Container(setup.host, f"{name}-b")
    image = f"firn.test/checkpoint/{name}:latest"
    workload = cases.counter(["--mib", f"{gib * 1024:.0f}"])
    setup.host.put(hosts.FIRN_CONFIG, configuration or None)
    setup.host.put(hosts.CRIU_CONFIG, "network-lock skip\n" + (f"libdir {plugin}\n" if is_stock else ""))
    try:
        source.run(STOCK if is_stock else setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        before = cases.wait_for_counts(source, end, 1, {}, 3)
        done, checkpoint = cases.timed(source.checkpoint, image, end)
        if done.returncode:
            source.keep_evidence(setup.evidence)
            raise Failed(f"the checkpoint failed: {done.stderr.strip()}")
        seen["checkpoint"] = source.timings()
        went_on = cases.wait_for_counts(source, end, 1, cases.counts(source), 2)
        source.remove(end)
        cases.wait_for_free_gpus(end)
        _, restore = cases.timed(copy.restore, image, end)
        seen["restore"] = copy.timings()
        after = cases.wait_for_counts(copy, end, 1, {}, 3, "restored")
        cases.check_holders(copy, end, uuids, gib)
        cases.compare(before, went_on, after)
        return checkpoint, restore
    finally:
        cases.clean_up(setup, [source, copy], image)
        cases.wait_for_free_gpus(hosts.Deadline(60))


def table(gib, taken, seen):
    """Medians, and how many times faster than the peer each way is."""
    lines = ["| GiB | way | rounds | checkpoint s | restore s | peer / it, checkpoint | peer / it, restore |", "|---|---|---|---|---|---|---|"]
    medians = {way: [statistics.median(values) for values in zip(*trips)] for way, trips in taken.items()}
    stock = next(iter(medians.values()), None)
    for way, (checkpoint, restore) in medians.items():
        lines.append(f"| {gib:g} | {way} | {len(taken[way])} | {checkpoint:.2f} | {restore:.2f} "
                     f"| {stock[0] / checkpoint:.2f} | {stock[1] / restore:.2f} |")
    phases = [f"{way}, {operation}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in timings.items())
              for way, each in seen.items() for operation, timings in each.items() if timings]
    return [*lines, "", *phases]


def second(setup, end, record, gib):
    """The second checkpoint of a server whose weights do not change: seconds, and bytes that the store gets."""
    uuids, _ = setup.pick(1)
    source, copy = Container(setup.host, "second"), Container(setup.host, "second-b")
    images = [f"firn.test/checkpoint/second-{number}:latest" for number in range(2)]
    workload = cases.counter(["--mib", "64", "--fixed-mib", f"{gib * 1024:.0f}"])
    record.update(gib=gib, counters=1, uuid_before=uuids, rows=[])
    store = mounted(setup, gib, end)
    setup.host.put(hosts.FIRN_CONFIG, ways(store)["store-huge"])
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        for image in images:
            before = cases.wait_for_counts(source, end, 1, cases.counts(source), 3)
            kept = shutil.disk_usage(store).used
            done, seconds = cases.timed(source.checkpoint, image, end)
            if done.returncode:
                raise Failed(f"the checkpoint failed: {done.stderr.strip()}")
            record["rows"].append({"s": seconds, "mib": (shutil.disk_usage(store).used - kept) >> 20, "ms": source.timings()})
            went_on = cases.wait_for_counts(source, end, 1, cases.counts(source), 2)
        source.remove(end)
        _, record["restore_s"] = cases.timed(copy.restore, images[1], end)
        record.update(cases.compare(before, went_on, cases.wait_for_counts(copy, end, 1, {}, 3, "restored")))
    finally:
        record["table"] = [f"{gib:g} GiB, checkpoint {number}: {row['s']} s, {row['mib']} MiB into the store"
                           for number, row in enumerate(record["rows"], 1)]
        for image in images:
            cases.clean_up(setup, [source, copy], image)
        unmount(setup, store)
