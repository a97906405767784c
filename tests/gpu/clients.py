"""Other clients than ctr: the two commands of firn next to the four of ctr, nerdctl, and the kubelet's calls.

The counter writes into a file of the machine, which is mounted into its container: so source and copy write into the
same one, one after the other, whoever starts them.
"""

import json
import os
import shutil
import statistics
import tarfile
import threading
import time
from functools import partial

import cases
import cdi
import host as hosts
from cases import Case
from host import Container, Failed

# Where the counter writes, in its container.
OUT = "/out"
# Where the kubelet's calls go.
CRI_SOCKET = "/run/containerd/containerd.sock"
# podman's configuration: what it has of its own is below the run's directories.
CONTAINERS = "/etc/containers"
STORAGE_CONF = """\
[storage]
driver = "vfs"
graphroot = "{memory}/podman"
runroot = "{work}/podman-run"
"""
CONTAINERS_CONF = """\
[containers]
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
conmon_path = ["{bin}/conmon"]
helper_binaries_dir = ["{work}/helpers"]
runtime_supports_json = ["firn-runc"]
[engine.runtimes]
firn-runc = ["{bin}/firn-runc"]
"""
# Checkpoints that pods may name.
NAMED = "/var/lib/firn-gpu-named"


def all_cases(args):
    """The cases; `args` are those of run.py."""
    sizes = [float(size) for size in args.client_gib.split(",")]
    return [
        *(Case(f"tool-{size:g}", 420, 1, partial(tool, gib=size, rounds=args.client_rounds), ("clients",)) for size in sizes),
        *(Case(f"tool-move-{size:g}", 200, 1, partial(moved, gib=size), ("clients",)) for size in sizes),
        *(Case(f"nerdctl-{size:g}", 200, 1, partial(nerdctl, gib=size), ("clients",)) for size in sizes),
        *(Case(f"cri-{size:g}", 200, 1, partial(cri, gib=size), ("clients",)) for size in sizes),
        *(Case(f"podman-{size:g}", 200, 1, partial(podman, gib=size), ("clients",)) for size in sizes),
        Case("cri-pod", 200, 2, partial(cri_pod, gib=sizes[0]), ("clients",)),
        Case("occupied", 180, 1, partial(occupied, gib=4), ("clients",)),
    ]


class Written:
    """A container by what its counter writes, and by its id in containerd."""

    def __init__(self, host, name, namespace=hosts.NAMESPACE):
        self.host, self.name, self.namespace = host, name, namespace
        self.directory = f"{host.work}/written/{name}"
        self._begin = 0
        self.id = name

    def open(self):
        """An empty file."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.makedirs(self.directory)
        return self

    def all_lines(self):
        """Complete lines of everybody who has written."""
        try:
            with open(f"{self.directory}/log", encoding="utf-8") as file:
                return file.read().split("\n")[:-1]
        except FileNotFoundError:
            return []

    def lines(self):
        """Those of the container that writes now."""
        return self.all_lines()[self._begin :]

    def hand_over(self, identity):
        """What is written from now on is that of another container."""
        self._begin, self.id = len(self.all_lines()), identity

    def pids(self, end):
        """The machine's ids of its processes."""
        return self.host.pids(self.id, end, self.namespace)

    def timings(self):
        """Milliseconds by phase of the shim's last transaction."""
        return hosts.timings_in(self.host.bundle(self.id, self.namespace))


def command(gib):
    """The counter of this size."""
    return ["/usr/bin/gpu-counter", "--mib", f"{gib * 1024:.0f}", "--out", f"{OUT}/log", "--interval-ms", "20"]


def goes_on(written, end, before, went_on, record):
    """The copy counts on from where the source stood, with its checksums."""
    after = cases.wait_for_counts(written, end, 1, {}, 3, "restored")
    record.update(cases.compare(before, went_on, after))


def started(setup, name, gib, end):
    """A counter by ctr on the first GPU; returns it, what it has counted, and where its copies go."""
    source_gpus, target_gpus = setup.pick(1)
    written = Written(setup.host, name).open()
    workload = cases.Workload(cases.COUNTER_IMAGE, command(gib), [
        "--mount", f"type=bind,src={written.directory},dst={OUT},options=rbind:rw"], gpus=1)
    container = Container(setup.host, name)
    container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(source_gpus))
    return container, written, cases.wait_for_counts(written, end, 1, {}, 3), source_gpus, target_gpus


def firn(setup, *words, end):
    """One of firn's own commands on the containers of ctr."""
    return setup.host.run("firn", *words, "--namespace", hosts.NAMESPACE, "--address", setup.host.socket(), deadline=end)


def tool(setup, end, record, gib, rounds):
    """A container to a file and back, onto another GPU: by ctr's four commands and by firn's two, in turns."""
    taken = {"ctr": [], "firn": []}
    record.update(gib=gib, counters=1)
    for number in range(rounds):
        for way, seconds in taken.items():
            seconds.append(one_trip(setup, end, record, f"tool-{number}-{way}", gib, way))
    medians = {way: [round(statistics.median(values), 2) for values in zip(*trips)] for way, trips in taken.items()}
    record["taken"] = taken
    record["table"] = ["| GiB | commands | rounds | checkpoint into a file s | restore from it s |", "|---|---|---|---|---|",
                       *(f"| {gib:g} | {way} | {rounds} | {values[0]} | {values[1]} |" for way, values in medians.items())]


def one_trip(setup, end, record, name, gib, way):
    """Seconds of the checkpoint and of the restore."""
    image, file = f"firn.test/checkpoint/{name}:latest", f"{setup.host.memory}/{name}.tar"
    setup.host.put(hosts.FIRN_CONFIG, None)
    source, written, before, record["uuid_before"], target_gpus = started(setup, name, gib, end)
    copy = Container(setup.host, f"{name}-b")
    host = setup.host

    def by_ctr_out():
        host.ctr("containers", "checkpoint", "--image", "--rw", "--task", name, image, deadline=end)
        host.ctr("images", "export", "--local", "--skip-manifest-json", file, image, deadline=end)

    def by_ctr_in():
        host.ctr("images", "import", "--local", "--no-unpack", file, deadline=end)
        copy.restore(image, end)

    def by_firn_in():
        firn(setup, "restore", file, "--name", copy.name, "--gpus", target_gpus[0], end=end)

    try:
        _, out = cases.timed(by_ctr_out if way == "ctr" else lambda: firn(setup, "checkpoint", name, file, end=end))
        record[f"{way}_checkpoint_ms"] = source.timings()
        went_on = cases.wait_for_counts(written, end, 1, cases.counts(written), 2)
        source.remove(end)
        host.remove_image(image, end)
        cases.wait_for_free_gpus(end)
        written.hand_over(copy.name)
        if way == "ctr":
            cases.grant(setup, record["uuid_before"], target_gpus)
        _, back = cases.timed(by_ctr_in if way == "ctr" else by_firn_in)
        record[f"{way}_restore_ms"] = copy.timings()
        goes_on(written, end, before, went_on, record)
        record["uuid_after"] = cases.check_holders(written, end, target_gpus, gib)
        return out, back
    finally:
        if os.path.exists(file):
            os.unlink(file)
        cases.clean_up(setup, [source, copy], image)
        cases.wait_for_free_gpus(hosts.Deadline(60))


def occupied(setup, end, record, gib):
    """A restore finds its GPU full: refused by name before the checkpoint is read; `--gpus auto` takes a free one."""
    host, name = setup.host, "occupied"
    file = f"{host.memory}/{name}.tar"
    source, written, before, record["uuid_before"], target_gpus = started(setup, name, gib, end)
    copy, big = Container(host, f"{name}-b"), Container(host, f"{name}-big")
    record.update(gib=gib, counters=1)
    try:
        firn(setup, "checkpoint", name, file, end=end)
        went_on = cases.wait_for_counts(written, end, 1, cases.counts(written), 2)
        source.remove(end)
        cases.wait_for_free_gpus(end)
        written.hand_over(copy.name)
        totals = {row["uuid"]: int(row["memory.total"]) for row in cdi.query("gpu", ["uuid", "memory.total"])}
        reserved = totals[record["uuid_before"][0]] - 1024 - int(gib * 512)
        workload = cases.counter(["--mib", "1", "--reserve-mib", f"{reserved}"])
        big.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(record["uuid_before"]))
        cases.wait_for_counts(big, end, 1, {}, 2)
        words = ["restore", file, "--name", copy.name]
        for more in ([], ["--dry-run"]):
            done, record["refused_s"] = cases.timed(lambda more=more: host.run(
                "firn", *words, *more, "--namespace", hosts.NAMESPACE, "--address", host.socket(), deadline=end, check=False))
            shown = done.stdout + done.stderr
            if done.returncode != 1 or "FIRN-GPU-OCCUPIED" not in shown or f"container {big.name} of namespace" not in shown:
                raise Failed(f"a restore onto a full GPU ends with {done.returncode}: {shown}")
            record["refusal"] = shown.strip().splitlines()[-1]
        cases.wait_for_counts(big, end, 1, cases.counts(big), 2)
        if target_gpus == record["uuid_before"]:
            big.remove(end)
            cases.wait_for_free_gpus(end)
        firn(setup, *words, "--gpus", "auto", end=end)
        goes_on(written, end, before, went_on, record)
        record["uuid_after"] = cases.check_holders(written, end, target_gpus, gib)
    finally:
        if os.path.exists(file):
            os.unlink(file)
        cases.clean_up(setup, [source, copy, big])
        cases.wait_for_free_gpus(hosts.Deadline(60))


def moved(setup, end, record, gib):
    """`firn move`: the other node is this one, and ssh a shell. The source is gone afterwards."""
    name = f"move-{gib:g}"
    ssh = f"{setup.host.work}/ssh"
    with open(ssh, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nshift\nexport CONTAINERD_ADDRESS={setup.host.socket()}\nexec sh -c "$*"\n')
    os.chmod(ssh, 0o755)
    source, written, before, record["uuid_before"], target_gpus = started(setup, name, gib, end)
    copy = Container(setup.host, f"{name}-b")
    record.update(gib=gib, counters=1)
    try:
        with Watch(f"{written.directory}/log") as watch:
            _, record["move_s"] = cases.timed(lambda: firn(
                setup, "move", name, "root@here", "--name", copy.name, "--gpus", target_gpus[0], "--ssh", ssh, end=end))
            seen = cases.counts(written)
            written.id = copy.name
            after = cases.wait_for_counts(written, end, 1, seen, 3, "moved")
        worker = next(iter(after))
        if sorted(after[worker]) != list(range(len(after[worker]))):
            raise Failed(f"the counter lost or repeated iterations: {sorted(after[worker])}")
        record.update(iter_before=max(before[worker]), iter_after=max(after[worker]), down_s=watch.longest())
        record["uuid_after"] = cases.check_holders(written, end, target_gpus, gib)
        if source.status(end):
            raise Failed(f"the source is {source.status(end)}, and should be gone")
        record["table"] = [f"firn move, {gib:g} GiB: {record['move_s']} s, the counter stood still for {record['down_s']} s"]
    finally:
        cases.clean_up(setup, [source, copy])
        cases.wait_for_free_gpus(hosts.Deadline(60))


class Watch:
    """The longest time in which a file did not grow."""

    def __init__(self, path):
        self._path, self._ended, self._times = path, threading.Event(), []
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _look(self):
        size = -1
        while not self._ended.wait(0.005):
            now = os.path.getsize(self._path)
            if now != size:
                size = now
                self._times.append(time.monotonic())

    def longest(self):
        """Its seconds."""
        return round(max(after - before for before, after in zip(self._times, self._times[1:])), 2)


def nerdctl(setup, end, record, gib):
    """`nerdctl checkpoint create`, `nerdctl start --checkpoint`, on another GPU where there is one."""
    source_gpus, target_gpus = setup.pick(1)
    name = f"nerdctl-{gib:g}"
    written = Written(setup.host, name).open()
    record.update(gib=gib, counters=1, uuid_before=source_gpus)

    def call(*words):
        return setup.host.run(
            "nerdctl", "--address", setup.host.socket(), "--namespace", hosts.NAMESPACE, "--data-root", f"{setup.host.memory}/nerdctl",
            *words, deadline=end).stdout.strip()

    try:
        written.id = call(
            "run", "--detach", "--runtime", setup.runtime, "--network", "none", "--device", f"nvidia.com/gpu={source_gpus[0]}",
            "--volume", f"{written.directory}:{OUT}", "--name", name, cases.COUNTER_IMAGE, *command(gib))
        before = cases.wait_for_counts(written, end, 1, {}, 3)
        _, record["checkpoint_s"] = cases.timed(lambda: call("checkpoint", "create", "--leave-running", name, f"of-{name}"))
        record["checkpoint_ms"] = written.timings()
        went_on = cases.wait_for_counts(written, end, 1, cases.counts(written), 2)
        call("kill", name)
        call("wait", name)
        cases.wait_for_free_gpus(end)
        cases.grant(setup, source_gpus, target_gpus)
        written.hand_over(written.id)
        _, record["restore_s"] = cases.timed(lambda: call("start", "--checkpoint", f"of-{name}", name))
        record["restore_ms"] = written.timings()
        goes_on(written, end, before, went_on, record)
        record["uuid_after"] = cases.check_holders(written, end, target_gpus, gib)
    finally:
        setup.host.put(hosts.FIRN_CONFIG, None)
        call("rm", "--force", name)
        cases.wait_for_free_gpus(hosts.Deadline(60))


class OfPodman(Written):
    """A container of podman, in which one process runs."""

    def pids(self, end):
        return [int(self.host.run("podman", "inspect", "--format", "{{.State.Pid}}", self.name, deadline=end).stdout)]


def podman(setup, end, record, gib):
    """`podman container checkpoint --export`, `podman container restore --import`, on another GPU where there is one."""
    source_gpus, target_gpus = setup.pick(1)
    name, host = f"podman-{gib:g}", setup.host
    written = OfPodman(host, name).open()
    archive, root = f"{host.memory}/{name}.tar", f"{host.memory}/podman-root.tar"
    record.update(gib=gib, counters=1, uuid_before=source_gpus)
    places = {"work": host.work, "memory": host.memory, "bin": f"{hosts.INSTALL_DIR}/bin"}
    # podman gives most calls of the runtime a PATH of its own.
    configuration = f'[runc]\npath = "{hosts.INSTALL_DIR}/bin/runc"\n'
    host.put(hosts.FIRN_CONFIG, configuration)
    os.makedirs(f"{host.work}/helpers", exist_ok=True)
    # podman starts with no network plugin in its place only if it finds the program.
    shutil.copy("/bin/true", f"{host.work}/helpers/netavark")
    host.put(f"{CONTAINERS}/storage.conf", STORAGE_CONF.format(**places))
    host.put(f"{CONTAINERS}/containers.conf", CONTAINERS_CONF.format(**places))
    host.put(f"{CONTAINERS}/policy.json", '{"default": [{"type": "insecureAcceptAnything"}]}')

    def call(*words):
        return host.run("podman", *words, deadline=end).stdout.strip()

    try:
        with tarfile.open(root, "w") as tar:
            tar.add(f"{hosts.INSTALL_DIR}/rootfs", arcname=".")
        call("import", root, "firn.test/podman:latest")
        os.unlink(root)
        call("--runtime", "firn-runc", "run", "--detach", "--network", "none", "--device", f"nvidia.com/gpu={source_gpus[0]}",
             "--volume", f"{written.directory}:{OUT}", "--name", name, "firn.test/podman:latest", *command(gib))
        before = cases.wait_for_counts(written, end, 1, {}, 3)
        _, record["checkpoint_s"] = cases.timed(
            lambda: call("container", "checkpoint", "--leave-running", "--compress", "none", "--export", archive, name))
        went_on = cases.wait_for_counts(written, end, 1, cases.counts(written), 2)
        call("rm", "--force", "--time", "0", name)
        cases.wait_for_free_gpus(end)
        host.put(hosts.FIRN_CONFIG, configuration + f'[restore]\ngpus = ["{target_gpus[0]}"]\n')
        written.hand_over(name)
        _, record["restore_s"] = cases.timed(lambda: call("--runtime", "firn-runc", "container", "restore", "--import", archive))
        goes_on(written, end, before, went_on, record)
        record["uuid_after"] = cases.check_holders(written, end, target_gpus, gib)
    finally:
        end = hosts.Deadline(60)
        call("rm", "--force", "--all", "--time", "0")
        call("rmi", "--force", "--all")
        host.put(hosts.FIRN_CONFIG, None)
        for path in (archive, root):
            if os.path.exists(path):
                os.unlink(path)
        cases.wait_for_free_gpus(end)


class Cri:
    """containerd's CRI services, called as the kubelet calls them."""

    def __init__(self, setup, end):
        self.setup, self.end = setup, end
        self._pods = []

    def __enter__(self):
        if os.path.lexists(CRI_SOCKET):
            raise Failed(f"{CRI_SOCKET} is there already")
        os.symlink(self.setup.host.socket(), CRI_SOCKET)
        return self

    def __exit__(self, *_):
        self.end = hosts.Deadline(60)
        for pod in list(self._pods):
            self.remove(pod)
        os.unlink(CRI_SOCKET)
        self.setup.host.put(hosts.FIRN_CONFIG, None)
        shutil.rmtree(NAMED, ignore_errors=True)
        cases.wait_for_free_gpus(self.end)

    def call(self, method, request):
        """A method's answer."""
        done = self.setup.host.run("cri-client", method, deadline=self.end, stdin=json.dumps(request))
        return json.loads(done.stdout)

    def pod(self, name, annotations):
        """Runs a pod in the machine's network."""
        config = {
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "attempt": 0},
            "logDirectory": f"{self.setup.host.work}/logs/{name}", "annotations": annotations,
            "linux": {"cgroupParent": "/firn-gpu-pods", "securityContext": {"namespaceOptions": {"network": "NODE", "pid": "CONTAINER"}}},
        }
        answer = self.call("RunPodSandbox", {"config": config, "runtimeHandler": "firn"})
        pod = {"id": answer["podSandboxId"], "config": config}
        self._pods.append(pod)
        return pod

    def start(self, pod, written, uuid, argv):
        """Starts a container of the pod with a GPU."""
        config = {
            "metadata": {"name": written.name, "attempt": 0}, "image": {"image": cases.COUNTER_IMAGE}, "command": argv,
            "CDIDevices": [{"name": f"nvidia.com/gpu={uuid}"}], "logPath": f"{written.name}.log",
            "mounts": [{"hostPath": written.directory, "containerPath": OUT}],
            "linux": {"securityContext": {"namespaceOptions": {"network": "NODE", "pid": "CONTAINER"}}},
        }
        request = {"podSandboxId": pod["id"], "config": config, "sandboxConfig": pod["config"]}
        identity = self.call("CreateContainer", request)["containerId"]
        _, seconds = cases.timed(self.call, "StartContainer", {"containerId": identity})
        return identity, seconds

    def remove(self, pod):
        """Ends a pod with its containers."""
        self.call("StopPodSandbox", {"podSandboxId": pod["id"]})
        self.call("RemovePodSandbox", {"podSandboxId": pod["id"]})
        self._pods.remove(pod)


# Files of the pod's /dev/shm: one by its name, and one by a deleted name while it has another, as glibc opens a named
# semaphore.
SHARED = (
    "cd /dev/shm && echo open >open && exec 7<>open && echo named >temporary && exec 6<>temporary && "
    'ln temporary named && rm temporary && cd / && exec "$@"'
)


def cri(setup, end, record, gib):
    """CheckpointContainer into the kubelet's archive; a pod whose annotation names it continues from there, with the
    files that it has open in the pod's /dev/shm."""
    source_gpus, target_gpus = setup.pick(1)
    written = Written(setup.host, f"cri-{gib:g}", hosts.CRI_NAMESPACE).open()
    archive = f"{setup.host.memory}/cri.tar"
    record.update(gib=gib, counters=1, uuid_before=source_gpus)
    setup.host.put(hosts.FIRN_CONFIG, f'[restore]\nfrom-dir = "{NAMED}"\n')
    with Cri(setup, end) as calls:
        try:
            pod = calls.pod("source", {})
            shared = ["/bin/sh", "-c", SHARED, "sh", *command(gib)]
            written.id, _ = calls.start(pod, written, source_gpus[0], shared)
            before = cases.wait_for_counts(written, end, 1, {}, 3)
            request = {"containerId": written.id, "location": archive, "timeout": "120"}
            _, record["checkpoint_s"] = cases.timed(calls.call, "CheckpointContainer", request)
            record["checkpoint_ms"] = written.timings()
            went_on = cases.wait_for_counts(written, end, 1, cases.counts(written), 2)
            calls.remove(pod)
            cases.wait_for_free_gpus(end)
            os.makedirs(f"{NAMED}/default/warm")
            with tarfile.open(archive) as tar:
                tar.extractall(f"{NAMED}/default/warm", filter="tar")
            pod = calls.pod("copy", {"firn.dev/restore-from": f"{written.name}=warm"})
            written.hand_over(None)
            written.id, record["restore_s"] = calls.start(pod, written, target_gpus[0], ["/bin/sleep", "1000"])
            record["restore_ms"] = written.timings()
            goes_on(written, end, before, went_on, record)
            record["uuid_after"] = cases.check_holders(written, end, target_gpus, gib)
        finally:
            if os.path.exists(archive):
                os.unlink(archive)


def cri_pod(setup, end, record, gib):
    """Both containers of a pod at one moment, `firn checkpoint --pod`; their copies have exchanged their GPUs."""
    uuids = [gpu["uuid"] for gpu in setup.gpus[:2]]
    counters = [Written(setup.host, f"pod-{letter}", hosts.CRI_NAMESPACE).open() for letter in "ab"]
    record.update(gib=2 * gib, counters=2, uuid_before=uuids)
    setup.host.put(hosts.FIRN_CONFIG, f'[restore]\nfrom-dir = "{NAMED}"\n')
    with Cri(setup, end) as calls:
        pod = calls.pod("source", {})
        for written, uuid in zip(counters, uuids):
            written.id, _ = calls.start(pod, written, uuid, command(gib))
        before = [cases.wait_for_counts(written, end, 1, {}, 3) for written in counters]
        os.makedirs(NAMED)
        words = ["checkpoint", "--pod", "default/source", f"{NAMED}/default", "--address", setup.host.socket()]
        _, record["checkpoint_s"] = cases.timed(lambda: setup.host.run("firn", *words, deadline=end))
        record["checkpoint_ms"] = counters[0].timings()
        went_on = [cases.wait_for_counts(written, end, 1, cases.counts(written), 2) for written in counters]
        calls.remove(pod)
        cases.wait_for_free_gpus(end)
        names = ",".join(f"{written.name}={written.name}" for written in counters)
        pod = calls.pod("copy", {"firn.dev/restore-from": names})
        spent = []
        for index, (written, uuid) in enumerate(zip(counters, reversed(uuids))):
            written.hand_over(None)
            written.id, seconds = calls.start(pod, written, uuid, ["/bin/sleep", "1000"])
            spent.append(seconds)
            goes_on(written, end, before[index], went_on[index], record)
            cases.check_holders(written, end, [uuid], gib)
        record.update(restore_s=spent, uuid_after=list(reversed(uuids)), restore_ms=counters[1].timings())
