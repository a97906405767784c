"""What pauses.py, slices.py and live_moves.py conclude from what they see, on made-up readings."""

import json
import subprocess
import tempfile
import time
import unittest
from unittest import mock

import cdi
import hook_cases
import host as hosts
import live_moves
import patient
import pauses
import slices


class Pauses(unittest.TestCase):
    """A pause is believed by what NVML shows, a move by the workload's time stamps, turns by firn's timings."""

    ROW = {"gib": 2, "idle_mib": 4, "running_mib": 2600, "parked_mib": 10, "resumed_mib": 2600}

    def test_a_parked_container_has_nothing_on_the_gpu(self):
        pauses.check_free(self.ROW)
        with self.assertRaisesRegex(hosts.Failed, "512 MiB are in use while it is parked, 4 MiB were without it"):
            pauses.check_free({**self.ROW, "parked_mib": 512})
        for when in ("running_mib", "resumed_mib"):
            with self.assertRaisesRegex(hosts.Failed, f"{when}: 2000 MiB"):
                pauses.check_free({**self.ROW, when: 2000})

    def test_sizes_that_a_gpu_has(self):
        setup, record = mock.Mock(gpus=[{"memory.total": "81559"}, {"memory.total": "40960"}]), {}
        self.assertEqual(pauses.fitting(setup, record, [32, 39, 40]), [32, 39])
        self.assertEqual(record, {"gib": 39, "left_out_gib": [40]})
        with self.assertRaisesRegex(hosts.Failed, "no room for 40 GiB"):
            pauses.fitting(setup, record, [40, 64])

    def test_memory_in_use(self):
        rows = [{"uuid": "a", "memory.used": "7"}, {"uuid": "b", "memory.used": "9"}]
        with mock.patch.object(cdi, "query", return_value=rows):
            self.assertEqual(pauses.used("b"), 9)

    def test_growth(self):
        early = {"shim_kib": 17000, "shim_files": 22, "shim_threads": 4, "leases": 2, "processes": 90, "taken_mib": 2000}
        pauses.check_growth(early, {**early, "shim_kib": 18000, "shim_threads": 9, "processes": 92, "taken_mib": 2400, "leases": 1})
        for name, value in (("shim_kib", 20000), ("shim_files", 23), ("leases", 3), ("processes", 95), ("taken_mib", 2600)):
            with self.assertRaisesRegex(hosts.Failed, f"after the cycles: {name}: {early[name]} -> {value}$"):
                pauses.check_growth(early, {**early, name: value})
        self.assertGreater(pauses.taken_mib(), 0)
        self.assertGreater(pauses.programs(), 0)

    def test_time_that_the_workload_stood_still(self):
        lines = [f"counter at={at} pid=1 iter=0 checksum=5 ok" for at in ("1.00", "1.02", "1.04", "1.06", "3.58", "3.60")]
        printed = live_moves.stamps(["a message", *lines])
        self.assertEqual(live_moves.downtime(printed, 4), 2.5)
        self.assertEqual(live_moves.downtime(printed[:4] + [1.08], 4), 0)
        for before in (1, 6):
            with self.assertRaisesRegex(hosts.Failed, "time stamps are too few"):
                live_moves.downtime(printed, before)

    def test_stamps_by_the_shell(self):
        command = live_moves.STAMPED % "printf 'counter pid=1 iter=0 ok\\ncounter pid=1 iter=1 ok\\n'"
        lines = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout.splitlines()
        self.assertEqual([line.split(" ", 2)[2] for line in lines], ["pid=1 iter=0 ok", "pid=1 iter=1 ok"])
        self.assertEqual(len(live_moves.stamps(lines)), 2)

    def timing(self, operation, container, ms):
        name = "gpu-checkpoint" if operation == "pause" else "gpu-restore"
        return {"op": operation, "container": container, "phases": [{"name": "inspect", "ms": 90}, {"name": name, "ms": ms}]}

    def test_what_turns_have_cost(self):
        lines = ["pause c: 9.00 s", "pause a: 2.10 s", "resume b: 1.10 s", "pause b: 2.20 s", "resume a: 1.00 s"]
        calls = [line.split(":")[0].split() for line in lines]
        timings = [self.timing(*call, ms) for call, ms in zip(calls, (8000, 2000, 1000, 2000, 1000))]
        self.assertEqual(slices.account(lines, timings), {"turns": 2, "lost_s": 6.4, "copies_s": 6.0, "ratio": 1.067})
        with self.assertRaisesRegex(hosts.Failed, "timings were seen of"):
            slices.account(lines, timings[1:])
        with self.assertRaisesRegex(hosts.Failed, "resume b: failed: x"):
            slices.account([*lines, "resume b: failed: x"], timings)
        with self.assertRaisesRegex(hosts.Failed, "copied nothing"):
            slices.account(lines, [self.timing(*call, 0) for call in calls])

    def test_every_timing_is_kept_before_the_next_replaces_it(self):
        with tempfile.TemporaryDirectory() as bundle:
            container = mock.Mock(bundle=lambda: bundle)
            container.name = "a"
            with slices.Timings([container]) as timings:
                for number, operation in enumerate(("pause", "resume", "pause"), 1):
                    with open(f"{bundle}/firn-timings.json", "w", encoding="utf-8") as file:
                        json.dump(self.timing(operation, "a", number), file)
                    end = time.monotonic() + 20
                    while len(timings.in_order()) < number and time.monotonic() < end:
                        time.sleep(0.01)
            self.assertEqual([found["op"] for found in timings.in_order()], ["pause", "resume", "pause"])

    def test_losses(self):
        reference = dict(enumerate("abcd"))
        slices.same_losses(reference, {0: "a", 1: "b", 2: "c"})
        with self.assertRaisesRegex(hosts.Failed, "steps are missing: 2 of 3"):
            slices.same_losses(reference, {0: "a", 2: "c"})
        with self.assertRaisesRegex(hosts.Failed, "loss x at step 1, uninterrupted b"):
            slices.same_losses(reference, {0: "a", 1: "x"})

    def resume(self, stderr, status="PAUSED", label="2 MiB of GPU-a in host memory; the last resume failed: busy"):
        container, running = mock.Mock(), mock.Mock()
        container.name, running.name = "one", "two"
        container.status.return_value = status
        container.host.ctr.return_value.stdout = json.dumps({"Labels": {"firn.dev/parked": label}})
        done = subprocess.CompletedProcess([], 1 if stderr else 0, "", stderr)
        with mock.patch.object(patient, "resume", return_value=done):
            pauses.refuse_resume(container, running, None)

    def test_a_gpu_in_use_refuses_the_resume(self):
        busy = "ctr: FIRN-GPU-BUSY: container two of namespace firn-gpu has the GPU"
        self.resume(busy)
        for stderr in ("", "ctr: FIRN-GPU-OCCUPIED: two", busy.replace("two", "three")):
            with self.assertRaisesRegex(hosts.Failed, "resume of one while two runs"):
                self.resume(stderr)
        with self.assertRaisesRegex(hosts.Failed, "is RUNNING, not PAUSED"):
            self.resume(busy, status="RUNNING")
        with self.assertRaisesRegex(hosts.Failed, "the label of one"):
            self.resume(busy, label="2 MiB of GPU-a in host memory")

    def test_bandwidth_before_and_after_a_move(self):
        lines = ["join=0 rank=0 pci=none", "join=0 mib=256 gbps=290.00", "step=1 loss=0x1p+0", "join=1 mib=256 gbps=280.00"]
        record = {}
        hook_cases.check_rates(record, *live_moves.by_group(lines))
        self.assertEqual(record["gbps"], {"source": {0: 290.0}, "copy": {1: 280.0}})


if __name__ == "__main__":
    unittest.main()
