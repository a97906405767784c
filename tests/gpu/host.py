"""A containerd of its own for the cases, and containers in it. Everything it sets up is removed by `close`."""

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import time

INSTALL_DIR = "/opt/firn-gpu"
# Also the name of the cgroup that ctr puts the containers into.
NAMESPACE = "firn-gpu"
# That of CRI, and the image of its sandboxes.
CRI_NAMESPACE = "k8s.io"
PAUSE_IMAGE = "firn.test/pause:latest"
# Where firn's programs look for containers: below the state directory that containerd has by default.
BUNDLES = "/run/containerd/io.containerd.runtime.v2.task"
CRIU_CONFIG = "/etc/criu/runc.conf"
FIRN_CONFIG = "/etc/firn/config.toml"

_CONTAINERD_CONFIG = """\
version = 3
root = "{work}/root"
state = "{work}/state"
disabled_plugins = [
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.snapshotter.v1.overlayfs"]
  root_path = "{memory}/snapshots"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.firn]
  runtime_type = "io.containerd.firn.v2"
  pod_annotations = ["firn.dev/*"]
  container_annotations = ["firn.dev/*"]
"""


class Failed(Exception):
    """A case did not go as it must; the text describes what was seen."""


class Deadline:
    """The end of a case. Every wait takes what is left of it."""

    def __init__(self, seconds):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self, at_most=None):
        """Seconds left; fails when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Failed(f"the case's time limit of {self.seconds:g} s is over")
        return left if at_most is None else min(left, at_most)

    def until(self, what, condition, at_most=60.0):
        """Poll `condition` until it gives something true, and return that."""
        give_up = time.monotonic() + self.left(at_most)
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > give_up:
                raise Failed(f"waited {at_most:g} s in vain: {what}")
            time.sleep(0.05)


class Host:
    """containerd on directories of its own, with the tools of `bin_dir` before those of the machine.

    Images, snapshots and CRIU's files lie in a tmpfs, the content store on disk: of a checkpoint of N bytes that
    makes N in memory and N on disk in addition to the process itself.
    """

    def __init__(self, work, bin_dir, memory, environment, log, configuration=None):
        self.work = work
        # What firn's configuration has whatever a case adds to it.
        self._configuration = configuration
        self.memory = f"{work}/memory"
        self.log = log
        self._options = memory
        self._daemon = None
        self._saved = {}
        path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        self.env = {
            **os.environ,
            "PATH": f"{bin_dir}:{path}" if bin_dir else path,
            # Where containerd unpacks checkpoints and has them written.
            "XDG_RUNTIME_DIR": f"{self.memory}/tmp",
            "TMPDIR": f"{self.memory}/tmp",
            **environment,
        }

    def open(self):
        """Mount, configure and start; returns when containerd answers."""
        if os.path.ismount(self.memory) or os.path.exists(f"{self.work}/containerd.sock"):
            raise Failed(f"{self.work} is in use by another run")
        shutil.rmtree(self.work, ignore_errors=True)
        os.makedirs(f"{self.work}/logs")
        os.makedirs(self.memory)
        # The size is given because machines that grow their memory as it is used show little of it at first.
        self._command("mount", "-t", "tmpfs", "-o", f"{self._options},mode=0755", "firn-gpu", self.memory)
        os.makedirs(f"{self.memory}/tmp")
        self.put(CRIU_CONFIG, "network-lock skip\n")
        if self._configuration:
            self.put(FIRN_CONFIG, None)
        self._hide_bundles()
        os.makedirs(BUNDLES, exist_ok=True)
        for namespace in (NAMESPACE, CRI_NAMESPACE):
            os.symlink(f"{self.work}/state/{os.path.basename(BUNDLES)}/{namespace}", f"{BUNDLES}/{namespace}")
        config = f"{self.work}/containerd.toml"
        with open(config, "w", encoding="utf-8") as file:
            file.write(_CONTAINERD_CONFIG.format(work=self.work, memory=self.memory, pause=PAUSE_IMAGE))
        with open(self.daemon_log(), "wb") as output:
            self._daemon = subprocess.Popen(
                ["containerd", "--config", config, "--log-level", "debug"],
                env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )
        Deadline(60).until("containerd to answer", self._answers)

    def _answers(self):
        if self._daemon.poll() is not None:
            raise Failed(f"containerd ended with {self._daemon.returncode}: {tail(self.daemon_log())}")
        return self.ctr("version", check=False, deadline=Deadline(10)).returncode == 0

    def close(self):
        """Remove what is left of the containers, stop containerd, unmount, put back the files."""
        if self._daemon and self._daemon.poll() is None:
            with contextlib.suppress(Failed):
                for name in self.ctr("containers", "ls", "-q", deadline=Deadline(20)).stdout.split():
                    self.log(f"left behind: container {name}")
                    Container(self, name).remove(Deadline(30))
            self._daemon.send_signal(signal.SIGTERM)
            try:
                self._daemon.wait(20)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        self._hide_bundles()
        for path, text in self._saved.items():
            if text is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            else:
                _write(path, text)
        # Rootfs mounts of containers that could not be removed lie below the work directory too.
        for mountpoint in sorted(mounts_below(self.work), reverse=True):
            subprocess.run(["umount", "-l", mountpoint], check=False)
        shutil.rmtree(self.work, ignore_errors=True)
        for cgroup in glob.glob(f"/sys/fs/cgroup/{NAMESPACE}") + glob.glob(f"/sys/fs/cgroup/*/{NAMESPACE}"):
            with contextlib.suppress(OSError):
                os.rmdir(cgroup)

    def _hide_bundles(self):
        """Remove the links to the bundles; empty directories above stay, as a containerd of the machine may count on them."""
        for namespace in (NAMESPACE, CRI_NAMESPACE):
            if os.path.islink(f"{BUNDLES}/{namespace}"):
                os.unlink(f"{BUNDLES}/{namespace}")

    def daemon_log(self):
        """containerd's log, which holds the shims' lines too."""
        return f"{self.work}/logs/containerd.log"

    def put(self, path, text):
        """Write a file of the machine; `close` brings its former content back. `None` removes it."""
        if path not in self._saved:
            try:
                with open(path, encoding="utf-8") as file:
                    self._saved[path] = file.read()
            except FileNotFoundError:
                self._saved[path] = None
        if path == FIRN_CONFIG and self._configuration:
            text = self._configuration + (text or "")
        if text is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        else:
            _write(path, text)

    def socket(self):
        """containerd's socket."""
        return f"{self.work}/containerd.sock"

    def ctr(self, *args, deadline, check=True, output=None, namespace=NAMESPACE):
        """Run ctr; its output is returned, or appended to the file `output`."""
        command = ["ctr", "--address", self.socket(), "--namespace", namespace, *args]
        return self._command(*command, deadline=deadline, check=check, output=output)

    def spawn_ctr(self, *args, output):
        """Start ctr and leave it running, its output appended to `output`."""
        command = ["ctr", "--address", f"{self.work}/containerd.sock", "--namespace", NAMESPACE, *args]
        with open(output, "ab") as file:
            return subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def run(self, *command, deadline, check=True, stdin=None):
        """Run a program with the environment of the daemon, and the text `stdin` as its input."""
        return self._command(*command, deadline=deadline, check=check, stdin=stdin)

    def _command(self, *command, deadline=None, check=True, output=None, stdin=None):
        shown = " ".join(command[:1] + command[5:] if command[0] == "ctr" else command)
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            to = stack.enter_context(open(output, "ab")) if output else subprocess.PIPE
            process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, stdout=to,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            try:
                out, err = process.communicate(stdin, timeout=deadline.left() if deadline else 60)
            except subprocess.TimeoutExpired as late:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise Failed(f"{shown}: cut off after {time.monotonic() - began:.1f} s") from late
        self.log(f"{shown}: {process.returncode} after {time.monotonic() - began:.2f} s")
        if check and process.returncode:
            raise Failed(f"{shown}: exit status {process.returncode}: {err.strip()}")
        return subprocess.CompletedProcess(command, process.returncode, out or "", err or "")

    def pids(self, container, deadline, namespace=NAMESPACE):
        """The machine's ids of a container's processes."""
        listed = self.ctr("tasks", "ps", container, check=False, deadline=deadline, namespace=namespace)
        rows = (line.split() for line in listed.stdout.splitlines()[1:])
        return [int(row[0]) for row in rows if row]

    def bundle(self, container, namespace=NAMESPACE):
        """The bundle directory of a container."""
        return f"{self.work}/state/{os.path.basename(BUNDLES)}/{namespace}/{container}"

    def import_image(self, archive, deadline, namespace=NAMESPACE):
        """Import and unpack an OCI archive."""
        self.ctr("images", "import", "--snapshotter", "overlayfs", archive, deadline=deadline, namespace=namespace)

    def remove_image(self, name, deadline):
        """Remove an image with its content, and what was unpacked of it."""
        self.ctr("images", "rm", "--sync", name, check=False, deadline=deadline)
        self.remove_unpacked()

    def remove_unpacked(self):
        """Remove what containerd leaves behind of unpacked checkpoints: not while a restored container is being started."""
        for left in glob.glob(f"{self.memory}/tmp/ctrd-checkpoint*"):
            shutil.rmtree(left, ignore_errors=True)


class Container:
    """A container by name; its output is gathered in one file, before and after a restore under that name."""

    def __init__(self, host, name):
        self.host = host
        self.name = name
        self.output = f"{host.work}/logs/{name}.out"
        self._attached = None

    def run(self, runtime, image, argv, deadline, options=()):
        """`ctr run --detach` and attach to its output."""
        self.host.ctr(
            "run", "--detach", "--runtime", runtime, *options, image, self.name, *argv, deadline=deadline, output=self.output
        )
        self._attach()

    def checkpoint(self, image, deadline):
        """`ctr containers checkpoint`: image, writable layer and task; the container runs on."""
        return self.host.ctr(
            "containers", "checkpoint", "--image", "--rw", "--task", self.name, image, check=False, deadline=deadline
        )

    def checkpoint_task(self, directory, deadline, leave=True):
        """`ctr task checkpoint` into a directory, with `--exit` unless it shall continue."""
        end = [] if leave else ["--exit"]
        return self.host.ctr(
            "tasks", "checkpoint", *end, "--image-path", directory, self.name, check=False, deadline=deadline
        )

    def restore(self, image, deadline):
        """`ctr containers restore --live` and attach to its output."""
        self.host.ctr(
            "containers", "restore", "--rw", "--live", self.name, image, deadline=deadline, output=self.output
        )
        self._attach()

    def _attach(self):
        # Lines printed between the end of the client above and this one wait in the task's fifos.
        self._attached = self.host.spawn_ctr("tasks", "attach", self.name, output=self.output)

    def lines(self):
        """Complete lines printed so far."""
        try:
            with open(self.output, encoding="utf-8", errors="replace") as file:
                return file.read().split("\n")[:-1]
        except FileNotFoundError:
            return []

    def has_ended(self):
        """Whether the attached client has, which it does with the task."""
        return self._attached.poll() is not None

    def exit_status(self, deadline, at_most):
        """Wait for the task's end; the attached client passes its status on."""
        try:
            return self._attached.wait(deadline.left(at_most))
        except subprocess.TimeoutExpired as late:
            raise Failed(f"{self.name} did not end within {at_most:g} s") from late

    def pids(self, deadline):
        """The machine's ids of the container's processes."""
        return self.host.pids(self.name, deadline)

    def status(self, deadline):
        """The task's status in ctr's words, None without a task."""
        listed = self.host.ctr("tasks", "ls", deadline=deadline).stdout
        rows = (line.split() for line in listed.splitlines()[1:])
        return next((row[-1] for row in rows if row and row[0] == self.name), None)

    def bundle(self):
        """The bundle directory that the shim works in."""
        return self.host.bundle(self.name)

    def timings(self):
        """Milliseconds by phase of the shim's last transaction on this container; empty with another shim."""
        return timings_in(self.bundle())

    def keep_evidence(self, directory):
        """Copy the logs of CRIU and runc out of the bundle."""
        patterns = ("*.log", "*.json", "work/*.log", "*/*.log", "firn-*")
        for path in {path for pattern in patterns for path in glob.glob(f"{self.bundle()}/{pattern}")}:
            if os.path.isfile(path):
                os.makedirs(directory, exist_ok=True)
                shutil.copy(path, f"{directory}/{self.name}.{os.path.relpath(path, self.bundle()).replace('/', '.')}")

    def remove(self, deadline):
        """Kill and delete. What resists is killed by pid and reported as a failure."""
        pids = self.pids(deadline)
        self.host.ctr("tasks", "kill", "--signal", "SIGKILL", "--all", self.name, check=False, deadline=deadline)
        if self._attached:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._attached.wait(deadline.left(15))
            if self._attached.poll() is None:
                self._attached.kill()
                self._attached.wait()
        self.host.ctr("tasks", "rm", "--force", self.name, check=False, deadline=deadline)
        self.host.ctr("containers", "rm", self.name, check=False, deadline=deadline)
        left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left or os.path.exists(self.bundle()):
            raise Failed(f"{self.name} could not be removed cleanly: processes {left or 'none'}, bundle {self.bundle()}")


def timings_in(bundle):
    """Milliseconds by phase of the shim's last transaction; empty without one."""
    try:
        with open(f"{bundle}/firn-timings.json", encoding="utf-8") as file:
            timings = json.load(file)
    except (OSError, ValueError):
        return {}
    return {**{phase["name"]: phase["ms"] for phase in timings["phases"]}, "total": timings["total_ms"]}


def mounts_below(directory):
    """Mount points at and below a directory."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            point = line.split()[4].encode().decode("unicode_escape")
            if point == directory or point.startswith(directory.rstrip("/") + "/"):
                found.append(point)
    return found


def tail(path, lines=12):
    """The last lines of a file."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-lines:]).strip()
    return ""


def _write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
