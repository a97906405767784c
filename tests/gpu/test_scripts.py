"""What the scripts conclude from what they see, on made-up readings. Run by selftest.sh."""

import concurrent.futures
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import cases
import cdi
import ddp
import firn_cli
import hook_cases
import host as hosts
import job_cases
import jobs
import kills
import moves
import patient
import ranks
import released
import run
import samples
import served
import simgpu_smi
import straggler
import traps
from test_pauses import Pauses
from test_turns import Lend, Turns  # their tests are run with these


class Traps(unittest.TestCase):
    """What a refused pipeline prints is compared step by step."""

    def test_first_difference(self):
        self.assertEqual(traps.compare({0: "a", 1: "b"}, {0: "a", 1: "c"}), "step 1: c, not b")
        self.assertEqual(traps.compare({0: "a", 1: "b"}, {0: "a"}), "step 1: None, not b")
        self.assertEqual(traps.compare({0: "a"}, {0: "a"}), "none")


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
        with self.assertRaisesRegex(hosts.Failed, "continues at 9"):
            self.compare({0: "a"}, {0: "a", 1: "b"}, {9: "x"})

    def test_lost_an_iteration(self):
        with self.assertRaisesRegex(hosts.Failed, "missing"):
            self.compare({0: "a"}, {0: "a", 1: "b", 2: "c", 3: "d"}, {1: "b", 3: "d"})

    def test_other_memory(self):
        with self.assertRaisesRegex(hosts.Failed, "checksum of 1 is x, not b"):
            self.compare({0: "a"}, {0: "a", 1: "b", 2: "c"}, {1: "x", 2: "c"})


class Patient(unittest.TestCase):
    """What a suspended container and whoever takes its GPU's memory show."""

    def went_on(self, iterations):
        record = {}
        with mock.patch.object(cases, "counts", return_value={(("pid", "1"),): dict.fromkeys(iterations, "a")}):
            patient.went_on(None, record)
        return record

    def test_counts_without_a_gap(self):
        self.assertEqual(self.went_on([0, 1, 2, 3]), {"iter_before": 0, "iter_after": 3})

    def test_lost_an_iteration(self):
        with self.assertRaisesRegex(hosts.Failed, "missing"):
            self.went_on([0, 1, 3])

    def test_resumed_or_not(self):
        container = mock.Mock(host=mock.Mock())
        container.host.ctr.return_value = mock.Mock(returncode=0)
        with mock.patch.object(patient.kills, "goes_on"):
            suspended = patient.comes_back(container, hosts.Deadline(5), "ctr: FIRN-GPU-SUSPENDED: x", 0)
            alone = patient.comes_back(container, hosts.Deadline(5), "ctr: FIRN-DRIVER: x", 0)
        self.assertTrue(suspended.startswith("was suspended, continued when resumed"), suspended)
        self.assertTrue(alone.startswith("continued, answer"), alone)
        container.host.ctr.assert_called_once()

    def test_a_code_is_returned(self):
        patient.expect_code("ctr: FIRN-DRIVER: x")
        with self.assertRaisesRegex(hosts.Failed, "no code"):
            patient.expect_code("ctr: EOF")


class Counts(unittest.TestCase):
    """`counts` takes whole lines that end with ok, by worker."""

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

    def refusal(self, message, codes=None, timings=None, status=1):
        return cases.refusal(mock.Mock(returncode=status, stderr=message), codes, timings or {})

    def test_its_code(self):
        message = "ctr: FIRN-IPC: cannot checkpoint container ipc: CUDA processes 7 (gpu-counter) ...\n"
        self.assertEqual(self.refusal(message), "FIRN-IPC")
        self.assertEqual(self.refusal(message, ["FIRN-NCCL", "FIRN-IPC"], {"inspect": 3, "total": 4}), "FIRN-IPC")

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
            self.refusal("FIRN-IPC: ...", ["FIRN-IPC"], {"inspect": 1, "gpu-lock": 2})

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


class FirnCli(unittest.TestCase):
    """Answers of firn's programs are believed only if they are whole and consistent."""

    def report(self, verdict, *signals):
        processes = [{"pid": 7, "cuda": True}, {"pid": 8, "cuda": False}]
        return json.dumps({"verdict": verdict, "processes": processes, "signals": signals})

    def signal(self, name, certainty, code=None):
        failure = {"failure": {"code": code, "message": "m", "hint": "h"}} if code else {}
        return {"signal": name, "certainty": certainty, "refused": code is not None, "source": "s", **failure}

    def test_audit(self):
        text = self.report(
            "cannot", self.signal("managed_memory", "certain", "FIRN-UVM"), self.signal("imex", "suspected"), self.signal("mps", "none"))
        found = firn_cli.parse_audit(1, text)
        self.assertEqual((found.verdict, found.codes, found.suspected, found.cuda), ("cannot", ["FIRN-UVM"], ["imex"], [7]))
        firn_cli.must_refuse(found, ["FIRN-IPC", "FIRN-UVM"])
        with self.assertRaisesRegex(hosts.Failed, "not FIRN-IPC"):
            firn_cli.must_refuse(found, ["FIRN-IPC"])
        with self.assertRaisesRegex(hosts.Failed, "reports can"):
            firn_cli.must_refuse(firn_cli.parse_audit(0, self.report("can")), ["FIRN-IPC"])

    def test_audit_that_failed_or_contradicts_itself(self):
        with self.assertRaisesRegex(hosts.Failed, "no answer: firn: no container x"):
            firn_cli.parse_audit(1, "", "firn: no container x")
        with self.assertRaisesRegex(hosts.Failed, "no answer: no container y"):
            firn_cli.parse_audit(1, '{"failure": {"message": "no container y"}}')
        with self.assertRaisesRegex(hosts.Failed, "reports can and ends with 1"):
            firn_cli.parse_audit(1, self.report("can"))

    def test_plan(self):
        accepted = {"accepted": True, "map": [{"old": "a", "new": "b"}, {"old": "b", "new": "a"}]}
        self.assertEqual(firn_cli.parse_plan(json.dumps(accepted)), {"a": "b", "b": "a"})
        with self.assertRaisesRegex(hosts.Failed, "FIRN-X"):
            firn_cli.parse_plan(json.dumps({"accepted": False, "failure": {"code": "FIRN-X"}}))
        self.assertEqual(firn_cli.parse_plan('{"accepted": true}'), {})

    def test_links(self):
        links = firn_cli.nvlinks({"topology": {"links": [
            {"gpus": ["a", "b"], "nvlinks": 18}, {"gpus": ["b", "c"], "nvlinks": 2}, {"gpus": ["a", "c"], "path": "node"}]}})
        self.assertEqual(links, {frozenset("ab"): 18, frozenset("bc"): 2})
        self.assertEqual(firn_cli.links_kept(links, {"a": "b", "b": "a"}), ["18 -> 18"])
        with self.assertRaisesRegex(hosts.Failed, r"joined by 18 NVLinks, their partners by 2"):
            firn_cli.links_kept(links, {"a": "b", "b": "c", "c": "a"})


class Moves(unittest.TestCase):
    """Where memory is, and where it should be."""

    def test_rotation_moves_every_gpu(self):
        self.assertEqual(moves.rotation(["a", "b"]), {"a": "b", "b": "a"})
        self.assertEqual(moves.rotation(["a", "b", "c"]), {"a": "b", "b": "c", "c": "a"})

    def test_memory_that_did_not_move(self):
        swap = {"a": "b", "b": "a"}
        moves.check_moved({7: "a", 8: "b"}, {7: "b", 8: "a"}, swap)
        for after in ({7: "a", 8: "b"}, {7: "b"}, {}):
            with self.assertRaisesRegex(hosts.Failed, "should be on"):
                moves.check_moved({7: "a", 8: "b"}, after, swap)

    def test_placement_is_by_the_larger_part_and_the_inner_pid(self):
        rows = [{"pid": "70", "gpu_uuid": uuid, "used_memory": size} for uuid, size in (("a", "500"), ("b", "2500"))]
        rows.append({"pid": "99", "gpu_uuid": "a", "used_memory": "9000"})
        container = mock.Mock(pids=lambda end: [70, 71])
        with mock.patch.object(cdi, "query", return_value=rows), mock.patch.object(moves, "inner_pid", return_value=1):
            self.assertEqual(moves.placement(container, None), {1: "b"})
        with mock.patch.object(cdi, "query", return_value=rows[2:]), self.assertRaisesRegex(hosts.Failed, "cannot be seen"):
            moves.placement(container, None)
        self.assertEqual(moves.parse_inner_pid("Name:\tx\nNSpid:\t4711\t12\nThreads:\t1\n"), 12)
        self.assertEqual(moves.inner_pid(os.getpid()), os.getpid())

    def test_every_cdi_file_of_the_gpus_is_set_aside(self):
        found = ["/nonexistent/a", "/nonexistent/b"]
        host = mock.Mock(put=lambda path, text: found.remove(path) if path in found else None)
        with mock.patch.object(cdi, "existing", lambda: found[0] if found else None), \
                mock.patch("builtins.open", mock.mock_open(read_data="kind: nvidia.com/gpu")):
            self.assertEqual(moves.set_aside(host), dict.fromkeys(["/nonexistent/a", "/nonexistent/b"], "kind: nvidia.com/gpu"))


class Losses(unittest.TestCase):
    """A training is believed only with the losses of the uninterrupted run."""

    REFERENCE = dict(enumerate("abcdef"))

    def test_goes_on(self):
        shown = cases.compare_losses(self.REFERENCE, {0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, {2: "c", 3: "d", 4: "e", 5: "f"})
        self.assertEqual((shown["iter_before"], shown["iter_after"], shown["losses_equal"]), (1, 2, 4))

    def test_began_again_skipped_or_differs(self):
        source = {0: "a", 1: "b", 2: "c"}
        for restored in (self.REFERENCE, {5: "f"}, {2: "c", 4: "e", 5: "f"}):
            with self.assertRaisesRegex(hosts.Failed, "restored at step"):
                cases.compare_losses(self.REFERENCE, {0: "a", 1: "b"}, source, restored)
        with self.assertRaisesRegex(hosts.Failed, "restored: loss x at step 4, uninterrupted e"):
            cases.compare_losses(self.REFERENCE, {1: "b"}, source, {2: "c", 3: "d", 4: "x", 5: "f"})
        with self.assertRaisesRegex(hosts.Failed, "source: loss x"):
            cases.compare_losses(self.REFERENCE, {1: "b"}, {1: "b", 2: "x"}, {2: "c", 3: "d", 4: "e", 5: "f"})


class Jobs(unittest.TestCase):
    """Every kind of job has a case; a job is believed only to its last step, a server by what it lost."""

    def test_every_kind_has_a_case(self):
        found = job_cases.all_cases()
        self.assertEqual([case.name for case in found], [f"job-{kind}" for kind in jobs.KINDS])
        self.assertTrue(all("jobs" in case.groups for case in found))

    def container(self, lines, has_ended=True):
        container = mock.Mock(lines=lambda: lines, has_ended=lambda: has_ended, exit_status=lambda end, at_most: 0)
        container.name = "job"
        return container

    def test_a_job_that_ends_early_is_not_waited_for(self):
        with self.assertRaisesRegex(hosts.Failed, "job has ended; it printed last: ImportError: no jax"):
            job_cases.reached(self.container(["ImportError: no jax"]), 8)
        self.assertFalse(job_cases.reached(self.container(["step=7 loss=0x1p+0"], False), 8))
        self.assertEqual(job_cases.reached(self.container(["step=8 loss=5:0x1p+0"], False), 8), {8: "5:0x1p+0"})

    def test_played_out(self):
        lines = ["step=0 loss=a", "step=1 loss=b", "Trainer stopped", "done", "a warning"]
        self.assertEqual(job_cases.played_out(self.container(lines), None, 2), {0: "a", 1: "b"})
        for short in (lines[:1] + lines[3:], lines[:3]):
            with self.assertRaisesRegex(hosts.Failed, "job ended with 0"):
                job_cases.played_out(self.container(short), None, 2)

    def test_what_server_and_client_print(self):
        self.assertEqual(job_cases.gone(["gone peer=4711", "step=1 loss=gone", "gone peer="]), [4711])
        with tempfile.NamedTemporaryFile("w") as log:
            log.write("port 4711\n7:0x1p+0\n8:0x1")
            log.flush()
            client = job_cases.Client(None, log.name)
            self.assertEqual((client.port(), client.tokens()), (4711, ["7:0x1p+0"]))


class Served(unittest.TestCase):
    """A copy has lost the clients of its source, and nobody has lost another."""

    def setUp(self):
        self.clients, self.record = {}, {}

    def look(self, name, gone):
        container = mock.Mock(lines=lambda: [f"gone peer={port}" for port in gone])
        container.name = name
        answers = iter(range(1, 100))
        client = mock.Mock(port=lambda: 4711, lines=lambda: ["port 4711", *["answer"] * 9 * next(answers)])
        with mock.patch.object(job_cases, "connect", return_value=client):
            served.look(None, self.record, self.clients, container, hosts.Deadline(0.2))

    def test_closed_in_the_copy_alone(self):
        self.look("torch-served", [])
        self.look("torch-served", [])
        self.look("torch-served-b", [4711])
        self.assertEqual((self.record["gone_torch-served"], self.record["gone_torch-served-b"]), ([], [4711]))

    def test_a_source_that_loses_its_client(self):
        self.look("torch-served", [])
        with self.assertRaisesRegex(hosts.Failed, r"torch-served has lost \[4711\]; .* ports \[\]"):
            self.look("torch-served", [4711])

    def test_a_copy_that_keeps_it_or_loses_another(self):
        self.look("torch-served", [])
        with self.assertRaisesRegex(hosts.Failed, "time limit|in vain"):
            self.look("torch-served-b", [])
        with self.assertRaisesRegex(hosts.Failed, "has lost"):
            self.look("torch-served-b", [4712])

    def test_a_client_that_lost_the_server(self):
        self.assertEqual(served.answers(["port 1", "answer", "answer"]), 2)
        with self.assertRaisesRegex(hosts.Failed, "closed"):
            served.answers(["answer", "closed"])


class JobServer(unittest.TestCase):
    """The generation server's connections, without a model."""

    def setUp(self):
        generator = jobs.Generator.__new__(jobs.Generator)
        generator.args = mock.Mock(pause=0.01)
        generator.tokens = lambda seed, count: (f"{seed}:{number}" for number in range(count))
        server = generator.serve(0)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.address = server.server_address

    def test_answers_and_notices_who_is_gone(self):
        with socket.create_connection(self.address) as connection, connection.makefile("rwb", buffering=0) as stream:
            stream.write(b"3 2\n")
            self.assertEqual(stream.readlines(), [b"3:0\n", b"3:1\n"])
        with mock.patch("builtins.print") as printed:
            with socket.create_connection(self.address) as connection:
                connection.sendall(b"4 1000\n")
                connection.recv(4)
                port = connection.getsockname()[1]
            hosts.Deadline(10).until("the server to notice", lambda: printed.called)
        printed.assert_called_once_with(f"gone peer={port}", flush=True)


class Ranks(unittest.TestCase):
    """Rates are read as they are printed; a rank that fails ends its job."""

    def test_rates(self):
        lines = ["NCCL version 2", "all_reduce mib=64 gbps=12.50", "all_reduce mib=256 gbps=20.00", "all_reduce mib=256"]
        self.assertEqual(ranks.rates(lines), {64: 12.5, 256: 20.0})
        shown = ranks.table(2, {"default": {64: 100.0, 256: 300.0}, "sockets": {64: 2.0}})
        self.assertEqual(shown[-2:], ["| 64 | 100 | 2 |", "| 256 | 300 | 0 |"])

    def test_ranks_end_together(self):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
            program.write("import sys, time\nif sys.argv[1] != sys.argv[-1]: time.sleep(100)\nsys.exit(int(sys.argv[-1]))\n")
            program.flush()
            ddp.start(program.name, ["0"], 1)
            with self.assertRaisesRegex(SystemExit, r"the ranks ended: \[-9, 1\]"):
                ddp.start(program.name, ["1"], 2)


class Lines(unittest.TestCase):
    """The run's log."""

    def test_a_line_goes_to_the_log_and_to_whoever_watches(self):
        with tempfile.TemporaryDirectory() as out, mock.patch("builtins.print") as printed:
            report = run.Report(out)
            report.log("for the log")
            report.show("for all")
            with open(f"{out}/run.log", encoding="utf-8") as file:
                lines = file.read().splitlines()
        self.assertEqual([line.split(maxsplit=1)[1] for line in lines], ["for the log", "for all"])
        printed.assert_called_once_with("for all", flush=True)


class Samples(unittest.TestCase):
    """What the driver's answers come to, and whether the audit had reported it."""

    GOOD = {(step, 7): "CUDA_SUCCESS" for step in ("lock", "checkpoint", "restore", "unlock")}

    def test_conclusions(self):
        refused = {("lock", 7): "CUDA_SUCCESS", ("checkpoint", 7): "CUDA_ERROR_NOT_SUPPORTED", ("unlock", 7): "CUDA_SUCCESS"}
        importer = {**self.GOOD, ("restore", 7): "CUDA_ERROR_INVALID_VALUE"}
        for answers, left_open, computes_on, outcome in (
            (self.GOOD, [], True, "works"), (self.GOOD, [], False, "lost"), (refused, [], True, "refused"), (refused, [], False, "lost"),
            (importer, [], True, "lost"), (self.GOOD, ["/dev/nvidia0"], True, "undumpable"), ({}, ["/dev/nvidiactl"], True, "undumpable"),
            ({("lock", 7): "hangs"}, [], True, "refused"),
        ):
            self.assertEqual(samples.conclude(answers, left_open, computes_on)[0], outcome, (answers, left_open, computes_on))
        self.assertEqual(samples.conclude(self.GOOD, ["/dev/nvidia0"], True, inherited=True)[0], "works")
        self.assertIn("restore: CUDA_ERROR_INVALID_VALUE", samples.conclude(importer, [], False)[1])

    def test_agreement(self):
        wanted = {
            ("can", "works"): "agrees", ("can", "refused"): "MISSED", ("can", "lost"): "MISSED", ("can", "undumpable"): "MISSED",
            ("cannot", "works"): "cautious", ("cannot", "refused"): "agrees", ("cannot", "lost"): "agrees",
            ("cannot", "undumpable"): "agrees", ("suspected", "works"): "cautious", ("suspected", "refused"): "warned",
            ("suspected", "undumpable"): "warned", ("suspected", "lost"): "MISSED",
        }
        self.assertEqual({key: samples.agreement(*key) for key in wanted}, wanted)
        self.assertEqual(samples.agreement("can", "lost", False), "the owner's word was false")
        self.assertEqual(samples.agreement("can", "lost", True), "MISSED")

    def test_lines_by_process(self):
        lines = ["sample two pid=7 iter=0 ok", "sample two pid=8 iter=0 ok", "sample two pid=7 iter=1 ok", "sample two pid=8 iter=1",
                 "gpu-sample pid=8: cuMemAlloc_v2 answered CUDA_ERROR_UNKNOWN"]
        self.assertEqual(samples.printed(lines), {"pid=7": 2, "pid=8": 1})

    def test_a_sample_that_ends_is_not_waited_for(self):
        container = mock.Mock(lines=lambda: ["gpu-sample pid=1: the driver's library lacks cuMemCreate"], has_ended=lambda: True)
        container.name = "sample-vmm"
        with self.assertRaisesRegex(hosts.Failed, "sample-vmm has ended; it printed last: .* lacks cuMemCreate"):
            samples.wait_for_lines(container, 1, {}, hosts.Deadline(60))
        self.assertFalse(samples.goes_on(container, 1, hosts.Deadline(60)))

    def test_files_of_gpus(self):
        with open("/dev/null", "rb"):
            self.assertEqual(samples.gpu_files([os.getpid(), 1 << 22]), [])

    def test_a_missed_sample_fails_the_case_and_the_others_are_played(self):
        record = {}
        rows = [{"sample": sample.name(), "agreement": "agrees", "seen": "a|b"} for sample in samples.SAMPLES]
        rows[2]["agreement"] = "MISSED"
        with mock.patch.object(samples, "play", side_effect=rows), self.assertRaisesRegex(hosts.Failed, rows[2]["sample"] + "$"):
            samples.samples(mock.Mock(), None, record)
        self.assertEqual(len(record["samples"]), len(samples.SAMPLES))
        self.assertEqual(record["table"][-1].count("|"), 7)

    def test_every_sample_has_a_name_of_its_own(self):
        names = [sample.name() for sample in samples.SAMPLES]
        self.assertEqual(len(names), len(set(names)))
        self.assertGreaterEqual(len({sample.habit for sample in samples.SAMPLES}), 10)


class SimgpuSmi(unittest.TestCase):
    """Simulated GPUs are shown as nvidia-smi shows real ones."""

    def test_rows(self):
        gpus, processes = simgpu_smi.parse(
            "driver 580.1 cuda 13000\n"
            "gpu 0 GPU-a NVIDIA H200 00000000:17:00.0 minor=0 node=7:3 used=12MiB total=64MiB\n"
            "  pid=12 gpu-counter state=running used=12MiB\n"
            "gpu 1 GPU-b NVIDIA H200 00000000:1F:00.0 minor=1 node=7:4 used=0MiB total=64MiB\n"
            "  pid=12 gpu-counter state=running used=0MiB\n")
        self.assertEqual([(gpu["uuid"], gpu["name"], gpu["memory.used"]) for gpu in gpus], [("GPU-a", "NVIDIA H200", "12"), ("GPU-b", "NVIDIA H200", "0")])
        self.assertEqual(processes, [{"pid": "12", "gpu_uuid": "GPU-a", "used_memory": "12"}])


class Straggler(unittest.TestCase):
    """A job is right only with every step, and every loss of the uninterrupted run."""

    REFERENCE = {0: "a", 1: "b", 2: "c"}

    def test_goes_on(self):
        record = {}
        straggler.check(self.REFERENCE, {0: "a", 1: "b", 2: "c", 3: "x"}, record)
        self.assertEqual(record, {"iter_after": 3, "losses_equal": 3})

    def test_another_loss_or_a_gap(self):
        for seen in ({0: "a", 1: "x"}, {0: "a", 2: "c"}, {1: "b"}):
            with self.assertRaises(hosts.Failed):
                straggler.check(self.REFERENCE, seen, {})

    def test_table(self):
        self.assertEqual(
            straggler.table("n", {"locks_ms": [3.2, None, 1, 20]}), ["n: 3 checkpoints, lock: least 1 ms, median 3 ms, most 20 ms"])


class Choice(unittest.TestCase):
    """Cases are chosen by name and by group, and shown with what they need."""

    def setUp(self):
        with mock.patch("sys.argv", ["run.py", "--cases", "bare,ddp"]):
            self.args = run.arguments()
        self.known = run.known_cases(self.args)

    def test_chosen(self):
        self.assertEqual([case.name for case in run.chosen(self.args, self.known)], ["bare", "ddp-sockets", "ddp-sockets-4"])
        self.args.cases = "bare,nothing"
        with self.assertRaisesRegex(SystemExit, "unknown case nothing"):
            run.chosen(self.args, self.known)

    def test_listed(self):
        names = [case.name for case in self.known]
        self.assertEqual(len(names), len(set(names)))
        lines = run.listing(self.known)
        self.assertEqual([line.split()[0] for line in lines[1:]], names)
        self.assertIn(["ddp-sockets-4", "4", "300", "ddp"], [line.split() for line in lines])


class Kills(unittest.TestCase):
    """A kill counts only if its victim was there at its moment and the client got an error."""

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
            return kills.killed(self.pool, {}, kills.by_signs(1), self.container, call, "criu", "criu_dump")

    def test_the_victim_dies_and_the_client_gets_an_error(self):
        self.assertEqual(self.kill(1, {"criu": [self.victim.pid]}), "it failed")

    def test_success_after_a_kill_is_a_failure(self):
        with self.assertRaisesRegex(hosts.Failed, "got success"):
            self.kill(0, {"criu": [self.victim.pid]})

    def test_a_call_that_ends_before_the_moment_is_a_failure(self):
        self.victim.kill()
        with self.assertRaisesRegex(hosts.Failed, "ended before criu_dump: exit status 1: it failed"):
            self.kill(1, {})

    def test_a_process_is_found_by_its_name_and_forgotten_when_it_has_ended(self):
        # The kernel names a process a moment after Popen has returned.
        deadline = time.monotonic() + 10
        while self.victim.pid not in kills.running("sleep") and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertIn(self.victim.pid, kills.running("sleep"))
        self.victim.kill()
        while os.waitid(os.P_PID, self.victim.pid, os.WEXITED | os.WNOWAIT) is None:
            pass
        self.assertNotIn(self.victim.pid, kills.running("sleep"))
        self.assertEqual(kills.status(self.victim.pid, "TracerPid"), 0)


class Hooks(unittest.TestCase):
    """A job with hooks is believed with its bandwidth and its addresses; a kill is made in its phase."""

    def test_the_example_is_what_runs(self):
        setup = mock.Mock()
        with tempfile.TemporaryDirectory() as work:
            setup.host.work = work
            with mock.patch.object(cdi, "known_to_loader", return_value=True):
                workload = hook_cases.job(setup, 2, ["--steps", "80"])
            self.assertEqual({os.path.basename(file) for file in hook_cases.FILES}, set(os.listdir(f"{work}/job")))
        options = " ".join(workload.options)
        for wanted in ("firn.dev/ipc=released-by-hook", "/job/firn_job.py release", "NCCL_NVLS_ENABLE=0", "src=shm", "--seccomp"):
            self.assertIn(wanted, options)
        self.assertNotIn("NCCL_P2P_DISABLE", options)
        self.assertEqual(options.count("firn.dev/hook-"), 4)

    def test_bandwidth(self):
        def lines(join, gbps):
            return [f"join={join} rank=0 pci=0000:17:00.0", f"join={join} mib=256 gbps={gbps}", "step=1 loss=0x1p+0"]

        record = {}
        hook_cases.check_rates(record, lines(0, "290.00") + lines(1, "10.00"), lines(1, "276.00"))
        self.assertEqual(record["gbps"], {"source": {0: 290.0, 1: 10.0}, "copy": {1: 276.0}})
        with self.assertRaisesRegex(hosts.Failed, "has 275 GB/s in the copy, it had 290"):
            hook_cases.check_rates({}, lines(0, "290.00"), lines(1, "275.00"))
        with self.assertRaisesRegex(hosts.Failed, "no bandwidth"):
            hook_cases.check_rates({}, lines(0, "290.00"), [])

    def test_addresses(self):
        source = hook_cases.addresses(["join=0 rank=0 pci=0000:17:00.0", "join=0 rank=1 pci=0000:1A:00.0", "join=1 rank=0 pci=none"])
        pairs = hook_cases.facts(['facts={"gpus": [{"old": {"pci": "00000000:1a:00.0"}, "new": {"pci": "00000000:17:00.0"}},'
                                  ' {"old": {"pci": "00000000:17:00.0"}, "new": {"pci": "00000000:1A:00.0"}}]}'])
        hook_cases.check_addresses(source, {"1/0": "0000:17:00.0"}, pairs)
        for wrong in (pairs[:1], [[old, old] for old, _ in pairs], []):
            with self.assertRaisesRegex(hosts.Failed, "restore.json has"):
                hook_cases.check_addresses(source, {"1/0": "0000:17:00.0"}, wrong)
        with self.assertRaisesRegex(hosts.Failed, "no addresses"):
            hook_cases.check_addresses(source, {}, pairs)

    def test_what_nccl_reported(self):
        lines = ["host:7:9 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 17000", "NCCL version 2",
                 "host:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "host:7:9 [0] NCCL INFO Using a lot"]
        self.assertEqual(hook_cases.nccl_lines(lines + lines), [
            "INFO comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 17000", "INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"])

    def test_phase_of_a_journal(self):
        journal = '{"event":"begin"}\n{"event":"enter","phase":"prepare"}\n'
        self.assertEqual(hook_cases.entered(journal), "prepare")
        self.assertEqual(hook_cases.entered(journal + '{"event":"cuda"}\n{"event":"enter","ph'), "prepare")
        self.assertIsNone(hook_cases.entered(journal + '{"event":"leave","phase":"prepare","ok":true}\n'))
        self.assertIsNone(hook_cases.entered('{"event":"begin"}\n'))

    def wait(self, phases, phase, done=False):
        call = mock.Mock(done=lambda: done, result=lambda: subprocess.CompletedProcess([], 1, "", "it failed"))
        with mock.patch.object(hook_cases, "phase_of", side_effect=phases), mock.patch.object(kills, "victims", return_value=[7]):
            hook_cases.in_phase(self.container, "criu", 0, call, phase)

    container = mock.Mock()

    def test_a_phase_is_waited_for(self):
        self.wait([None, "prepare", "criu-dump"], "criu-dump")
        self.wait([None, "prepare", "gpu-checkpoint"], "gpu-lock")
        with self.assertRaisesRegex(hosts.Failed, "ended before criu-dump: exit status 1: it failed"):
            self.wait(["gpu-lock", None], "criu-dump", done=True)

    def test_sums_of_raw_ranks(self):
        container = mock.Mock(lines=lambda: ["rank=0 step=3 sum=7", "rank=1 step=3 sum=7", "rank=1 step=3 su"])
        self.assertEqual(hook_cases.sums(container), {(3, "0"): "7", (3, "1"): "7"})

    def test_a_copy_goes_on_where_the_source_was(self):
        source = dict(enumerate("abcdefgh", 10))
        hook_cases.same({11: "b", 12: "c", 13: "d", 14: "e", 18: "x"}, source)
        for copy in ({9: "x", 10: "a", 11: "b", 12: "c", 13: "d"}, {11: "b", 12: "c", 13: "d"}, {11: "b", 12: "c", 13: "d", 14: "x"}):
            with self.assertRaisesRegex(hosts.Failed, "the copy began at"):
                hook_cases.same(copy, source)


class Released(unittest.TestCase):
    """A job that lets go of its GPU has the values of one that is never moved."""

    def found(self, *parts):
        values = released.example().values(40)
        return [{step: (values[step], device) for step in steps} for steps, device in parts]

    def test_values_are_compared_over_all_containers(self):
        found = self.found((range(10), "cpu"), (range(10, 18), "cpu"), (range(18, 25), "GPU-2"))
        released.check(found, ["cpu", "cpu", "GPU-2"])
        with self.assertRaisesRegex(hosts.Failed, "should have on .*GPU-3"):
            released.check(found, ["cpu", "cpu", "GPU-3"])
        found[1][12] = ("00000000", "cpu")
        with self.assertRaisesRegex(hosts.Failed, r"steps \[12\]"):
            released.check(found, ["cpu", "cpu", "GPU-2"])

    def test_a_step_that_is_lost_or_repeated_shows(self):
        for second in (range(11, 18), range(9, 18)):
            with self.assertRaisesRegex(hosts.Failed, "missing or repeated"):
                released.check(self.found((range(10), "cpu"), (second, "GPU-2")), ["cpu", "GPU-2"])

    def test_the_job_lets_go_and_goes_on(self):
        with tempfile.TemporaryDirectory() as directory:
            environment = {**os.environ, "FIRN_JOB_DIRECTORY": directory, "PYTHONDONTWRITEBYTECODE": "1"}
            program = f"{released.EXAMPLE}/device_free.py"
            with subprocess.Popen(
                [sys.executable, program, "run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as job:
                try:
                    for verb in ("release", "take", "release"):
                        subprocess.run([sys.executable, program, verb], env=environment, check=True, timeout=30)
                    lines = [job.stdout.readline().rstrip("\n") for _ in range(8)]
                finally:
                    job.kill()
        found = released.printed(lines)
        self.assertEqual(list(found), list(range(8)))
        expected = released.example().values(8)
        self.assertEqual({step: value for step, (value, _) in found.items()}, expected)


if __name__ == "__main__":
    unittest.main()
