"""What the scripts conclude from what they see, on made-up readings. Run by selftest.sh."""

import concurrent.futures
import os
import stat
import subprocess
import tempfile
import unittest
from unittest import mock

import cases
import cdi
import host as hosts
import kills


class Compare(unittest.TestCase):
    """`compare` believes a restored counter only if it continues the frozen one."""

    WORKER = (("pid", "1"),)

    def compare(self, before, source, restored):
        def by_worker(iterations):
            return {self.WORKER: iterations}

        return cases.compare(by_worker(before), by_worker(source), by_worker(restored))

    def test_continues(self):
        shown = self.compare({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c", 3: "d"}, {2: "c", 3: "d", 4: "e"})
        self.assertEqual((shown["iter_before"], shown["iter_after"], shown["checksum_restored"]), (1, 2, "c"))

    def test_began_again(self):
        with self.assertRaisesRegex(hosts.Failed, "began again at 0"):
            self.compare({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, {0: "a", 1: "b"})

    def test_skipped_ahead(self):
        with self.assertRaisesRegex(hosts.Failed, "goes on at 9"):
            self.compare({0: "a"}, {0: "a", 1: "b"}, {9: "x"})

    def test_lost_an_iteration(self):
        with self.assertRaisesRegex(hosts.Failed, "missing"):
            self.compare({0: "a"}, {0: "a", 1: "b", 2: "c", 3: "d"}, {1: "b", 3: "d"})

    def test_other_memory(self):
        with self.assertRaisesRegex(hosts.Failed, "checksum of 1 is x, not b"):
            self.compare({0: "a"}, {0: "a", 1: "b", 2: "c"}, {1: "x", 2: "c"})


class Counts(unittest.TestCase):
    """`counts` takes whole lines that say ok, by worker."""

    def test_lines(self):
        container = mock.Mock(lines=lambda: [
            "counter pid=7 thread=0 gpu=0 uuid=GPU-a iter=0 checksum=5 ok",
            "counter pid=8 thread=0 gpu=0 uuid=GPU-a iter=0 checksum=6 ok",
            "counter pid=7 thread=0 gpu=0 uuid=GPU-b iter=1 checksum=7 ok",
            "counter pid=7 thread=0 gpu=0 uuid=GPU-b iter=2 checksum=8",
            "gpu-counter pid=7: iteration 2: 4 elements do not hold what they should",
        ])
        workers = [(("pid", pid), ("thread", "0"), ("gpu", "0")) for pid in "78"]
        self.assertEqual(cases.counts(container), {workers[0]: {0: "5", 1: "7"}, workers[1]: {0: "6"}})


class Refusal(unittest.TestCase):
    """`refusal` believes a refusal only by its code, and one by name only if nothing had been begun."""

    def refusal(self, said, codes=None, account=None, status=1):
        return cases.refusal(mock.Mock(returncode=status, stderr=said), codes, account or {})

    def test_its_code(self):
        said = "ctr: FIRN-IPC: cannot checkpoint container ipc: CUDA processes 7 (gpu-counter) ...\n"
        self.assertEqual(self.refusal(said), "FIRN-IPC")
        self.assertEqual(self.refusal(said, ["FIRN-NCCL", "FIRN-IPC"], {"inspect": 3, "total": 4}), "FIRN-IPC")

    def test_success(self):
        with self.assertRaisesRegex(hosts.Failed, "succeeded"):
            self.refusal("", status=0)

    def test_no_code_or_another(self):
        with self.assertRaisesRegex(hosts.Failed, "without a FIRN code: ctr: no"):
            self.refusal("ctr: no")
        with self.assertRaisesRegex(hosts.Failed, "FIRN-DUMP, not FIRN-IPC"):
            self.refusal("FIRN-DUMP: ...", ["FIRN-IPC"])

    def test_too_late(self):
        with self.assertRaisesRegex(hosts.Failed, "after the lock"):
            self.refusal("FIRN-IPC: ...", ["FIRN-IPC"], {"inspect": 1, "lock": 2})

    def test_reads_of_the_importer(self):
        container = mock.Mock(lines=lambda: [
            "counter pid=7 thread=0 gpu=0 uuid=GPU-a iter=0 checksum=5 ok",
            "importer pid=8 gpu=0 iter=0 first=0x00000001 ok",
            "importer pid=8 gpu=0 iter=1 first=0x00000001",
            "importer pid=8 gpu=0 iter=2 first=0x00000002 ok",
        ])
        self.assertEqual(cases.imports(container), 2)


class Cdi(unittest.TestCase):
    """The spec grants the nodes that are there, as they are."""

    def setUp(self):
        self.dev = tempfile.mkdtemp()
        self.addCleanup(os.rmdir, self.dev)
        for name, minor in (("nvidia0", 3), ("nvidia1", 5), ("nvidiactl", 7)):
            os.mknod(f"{self.dev}/{name}", stat.S_IFCHR | 0o600, os.makedev(1, minor))
            self.addCleanup(os.unlink, f"{self.dev}/{name}")
        self.gpus = [{"index": "0", "uuid": "GPU-a", "minor": 1}, {"index": "1", "uuid": "GPU-b", "minor": 0}]

    def nodes(self, spec, name):
        edits = next(device["containerEdits"] for device in spec["devices"] if device["name"] == name)
        return [(node["path"], node["major"], node["minor"]) for node in edits["deviceNodes"]]

    def test_index_and_uuid_name_the_node_of_the_minor_number(self):
        spec = cdi.spec(self.gpus, [("libcuda.so.1", "/drv/libcuda.so.580")], dev=self.dev)
        self.assertEqual(self.nodes(spec, "0"), [("/dev/nvidia1", 1, 5)])
        self.assertEqual(self.nodes(spec, "GPU-b"), [("/dev/nvidia0", 1, 3)])
        self.assertEqual(self.nodes(spec, "all"), [("/dev/nvidia1", 1, 5), ("/dev/nvidia0", 1, 3)])
        common = spec["containerEdits"]
        self.assertEqual([node["path"] for node in common["deviceNodes"]], ["/dev/nvidiactl"])
        self.assertEqual(common["mounts"][0]["containerPath"], "/usr/lib/x86_64-linux-gnu/libcuda.so.1")

    def test_an_own_spec_of_the_machine_is_found(self):
        with tempfile.TemporaryDirectory() as directory:
            for name, text in (("a.yaml", "kind: example.com/gpu"), ("b.json", '{"kind": "nvidia.com/gpu-other"}')):
                with open(f"{directory}/{name}", "w", encoding="utf-8") as file:
                    file.write(text)
            with open(f"{directory}/nvidia.yaml", "w", encoding="utf-8") as file:
                file.write("---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
            self.assertEqual(cdi.existing([directory]), f"{directory}/nvidia.yaml")

    def test_the_running_drivers_libraries_come_first(self):
        with tempfile.TemporaryDirectory() as directory:
            places = []
            for place, version in (("compat", "575.1"), ("driver", "580.2")):
                os.makedirs(f"{directory}/{place}")
                for stem in cdi.REQUIRED:
                    name = f"{directory}/{place}/{stem}.so"
                    with open(f"{name}.{version}", "w", encoding="utf-8"):
                        os.symlink(f"{stem}.so.{version}", f"{name}.1")
                    places += [f"{name}.1", f"{name}.{version}"]
            found = dict(cdi.driver_libraries("580.2", places))
            for stem in cdi.REQUIRED:
                wanted = f"{directory}/driver/{stem}.so.580.2"
                self.assertEqual([found[f"{stem}.so.1"], found[f"{stem}.so.580.2"]], [wanted, wanted])
            with self.assertRaisesRegex(cdi.NoDriver, "libnvidia-ml"):
                cdi.driver_libraries("580.2", places[:2])

    def test_a_missing_node_is_named(self):
        self.gpus[0]["minor"] = 4
        with self.assertRaisesRegex(cdi.NoDriver, "nvidia4"):
            cdi.spec(self.gpus, [], dev=self.dev)


class Kills(unittest.TestCase):
    """A kill counts only if its victim was there at its moment and the client was told of a failure."""

    def setUp(self):
        self.victim = subprocess.Popen(["sleep", "1000"])
        self.addCleanup(self.victim.wait)
        self.addCleanup(self.victim.kill)
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.addCleanup(self.pool.shutdown)
        self.container = mock.Mock()
        self.container.name = "c"

    def kill(self, returncode, programs):
        def call():
            self.victim.wait()
            return subprocess.CompletedProcess([], returncode, "", "it failed")

        def of(program):
            return programs.get(program, [])

        with mock.patch.object(kills, "running", of), mock.patch.object(kills, "INTO_CRIU", 0):
            return kills.killed(self.pool, {}, 1, self.container, call, "criu", "dump")

    def test_the_victim_dies_and_the_client_is_told(self):
        self.assertEqual(self.kill(1, {"criu": [self.victim.pid]}), "it failed")

    def test_success_after_a_kill_is_a_failure(self):
        with self.assertRaisesRegex(hosts.Failed, "told of success"):
            self.kill(0, {"criu": [self.victim.pid]})

    def test_a_call_that_ends_before_the_moment_is_a_failure(self):
        self.victim.kill()
        with self.assertRaisesRegex(hosts.Failed, "ended before dump: exit status 1: it failed"):
            self.kill(1, {})

    def test_a_process_is_found_by_its_name_and_forgotten_when_it_has_ended(self):
        self.assertIn(self.victim.pid, kills.running("sleep"))
        self.victim.kill()
        while os.waitid(os.P_PID, self.victim.pid, os.WEXITED | os.WNOWAIT) is None:
            pass
        self.assertNotIn(self.victim.pid, kills.running("sleep"))
        self.assertEqual(kills.status(self.victim.pid, "TracerPid"), 0)


if __name__ == "__main__":
    unittest.main()
