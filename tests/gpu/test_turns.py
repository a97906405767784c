"""The programs of examples/time-slicing, over a stand-in for ctr."""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/time-slicing")
TURNS, LEND = f"{EXAMPLE}/turns", f"{EXAMPLE}/kubernetes/lend"

# Tasks are files with their status in $TASKS; what a filter selects is in $TASKS/.FILTER, all tasks for that of a queue;
# what fails is in $TASKS/.fail, each call in $TASKS/.calls.
FAKE_CTR = """#!/bin/sh
cd "$TASKS"
case "$1 $2" in
"containers list")
    [ "$3" = --quiet ] || exit 9
    if [ "$4" = labels.turns==gpu0 ]; then ls; else cat ".$4" 2>/dev/null; fi ;;
"containers info") printf '{\n  "Labels": {\n    "io.kubernetes.pod.uid": "uid-%s",\n    "x": "y"\n' "$3" ;;
"tasks list") echo 'TASK    PID    STATUS'; for task in *; do [ -f "$task" ] && echo "$task    7    $(cat "$task")"; done; true ;;
*)
    echo "$2 $3" >>.calls
    if grep -qx "$2 $3" .fail; then echo "ctr: FIRN-GPU-BUSY: no $2 of $3" >&2; exit 1; fi
    case $2 in pause) echo PAUSED >"$3" ;; resume) echo RUNNING >"$3" ;; esac
esac
"""


def load_turns():
    """The program as a module."""
    loader = importlib.machinery.SourceFileLoader("turns", TURNS)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("turns", loader))
    loader.exec_module(module)
    return module


class FakeTasks(unittest.TestCase):
    """Tasks of the stand-in."""

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.tasks, programs = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        with open(f"{programs}/ctr", "w", encoding="utf-8") as file:
            file.write(FAKE_CTR)
        os.chmod(f"{programs}/ctr", 0o755)
        path = f"{programs}:{os.environ['PATH']}"
        stack.enter_context(mock.patch.dict(os.environ, TASKS=self.tasks, PATH=path))
        for name in (".fail", ".calls"):
            self.write(name, "")

    def write(self, name, text):
        with open(f"{self.tasks}/{name}", "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, name):
        with open(f"{self.tasks}/{name}", encoding="utf-8") as file:
            return file.read()

    def fail(self, *calls):
        self.write(".fail", "".join(f"{call}\n" for call in calls))

    def calls(self):
        """The calls since the last time."""
        found = self.read(".calls").splitlines()
        self.write(".calls", "")
        return found


class Turns(FakeTasks):
    """Each container has its turn, one at a time, whatever fails."""

    def setUp(self):
        super().setUp()
        self.now = 0
        self.queue = load_turns().Queue("labels.turns==gpu0", 60, lambda: self.now)

    def step(self, seconds=1):
        """What is called at a look so much later, and what is printed."""
        self.now += seconds
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.queue.step()
        self.printed = printed.getvalue()
        return self.calls()

    def test_new_ones_are_paused_and_each_has_its_turn(self):
        for name in "abc":
            self.write(name, "RUNNING\n")
        self.assertEqual(self.step(), ["pause b", "pause c"])
        self.assertEqual(self.step(59), [])
        self.assertEqual(self.step(), ["pause a", "resume b"])
        self.assertRegex(self.printed, r"^pause a: \d+\.\d\d s\nresume b: \d+\.\d\d s\n$")
        self.write("d", "RUNNING\n")
        self.assertEqual(self.step(), ["pause d"])
        self.assertEqual([self.step(60) for _ in range(4)], [
            ["pause b", "resume c"], ["pause c", "resume a"], ["pause a", "resume d"], ["pause d", "resume b"]])

    def test_an_ended_one_leaves_and_the_next_one_comes_at_once(self):
        for name in "abc":
            self.write(name, "RUNNING\n")
        self.step()
        os.unlink(f"{self.tasks}/b")
        self.write("a", "STOPPED\n")
        self.assertEqual(self.step(), ["resume c"])
        self.assertEqual(self.step(600), [])

    def test_one_alone_keeps_the_gpu(self):
        self.write("a", "RUNNING\n")
        self.assertEqual([self.step(60) for _ in range(3)], [[], [], []])

    def test_one_that_cannot_be_paused_has_another_turn(self):
        for name in "ab":
            self.write(name, "RUNNING\n")
        self.step()
        self.fail("pause a")
        self.assertEqual(self.step(60), ["pause a"])
        self.assertIn("pause a: failed: ctr: FIRN-GPU-BUSY: no pause of a", self.printed)
        self.assertEqual(self.step(59), [])
        self.fail()
        self.assertEqual(self.step(1), ["pause a", "resume b"])

    def test_one_that_cannot_be_resumed_does_not_stop_the_others(self):
        for name in "abc":
            self.write(name, "RUNNING\n")
        self.step()
        self.fail("resume b")
        self.assertEqual(self.step(60), ["pause a", "resume b"])
        self.assertEqual(self.step(), ["resume c"])
        self.assertEqual(self.step(60), ["pause c", "resume a"])
        self.assertEqual(self.step(60), ["pause a", "resume b"])
        self.assertNotIn("failed", self.printed, "the same error again")

    def test_a_new_one_that_cannot_be_paused_is_not_resumed(self):
        for name in "ab":
            self.write(name, "RUNNING\n")
        self.fail("pause b")
        self.assertEqual(self.step(), ["pause b"])
        self.assertEqual(self.step(60), ["pause b"])
        self.fail()
        self.assertEqual(self.step(), ["pause b", "pause a", "resume b"])

    def test_what_others_pause_and_resume(self):
        for name in "ab":
            self.write(name, "RUNNING\n")
        self.step()
        self.write("a", "PAUSING\n")
        self.assertEqual(self.step(60), [])
        self.write("a", "PAUSED\n")
        self.assertEqual(self.step(), ["resume b"])
        self.write("a", "RUNNING\n")
        self.assertEqual(self.step(), ["pause a"])

    def test_a_signal_ends_it_and_leaves_all_as_they_are(self):
        for name in "ab":
            self.write(name, "RUNNING\n")
        command = [sys.executable, "-B", TURNS, "--seconds", "0.1", "--look", "0.05", "labels.turns==gpu0"]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(program.wait)
        self.addCleanup(program.kill)
        deadline = time.monotonic() + 20
        calls = []
        while len(calls) < 7 and time.monotonic() < deadline:
            time.sleep(0.02)
            calls = self.read(".calls").split("\n")
        program.send_signal(signal.SIGTERM)
        printed = program.communicate(timeout=20)[0]
        self.assertEqual(program.returncode, 0)
        self.assertEqual(calls[:4], ["pause b", "pause a", "resume b", "pause b"])
        self.assertEqual([line.split(":")[0] for line in printed.splitlines()], self.calls())
        self.assertEqual({self.read("a"), self.read("b")}, {"RUNNING\n", "PAUSED\n"})

    def test_containerd_may_be_away(self):
        os.environ["TASKS"] = f"{self.tasks}/none"
        command = [sys.executable, "-B", TURNS, "--look", "0.02", "labels.other==x"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            line = program.stdout.readline()
            time.sleep(0.2)
            program.terminate()
            self.assertEqual(program.communicate(timeout=20)[0], "", "the same error again")
        self.assertIn("look: failed: ", line)


class Lend(FakeTasks):
    """Lent containers are paused as long as an urgent pod is there, and no others are touched."""

    KIND = 'labels."io.cri-containerd.kind"'

    def setUp(self):
        super().setUp()
        self.free = f"{self.tasks}/.free"
        for label, pod in (("lent", "train"), ("urgent", "answer")):
            self.write(f".labels.gpu=={label},{self.KIND}==sandbox", f"{pod}-pod\n")
            self.write(f'.labels."io.kubernetes.pod.uid"==uid-{pod}-pod,{self.KIND}==container', f"{pod}\n")
        for name in ("train-pod", "train", "other"):
            self.write(name, "RUNNING\n")
        self.write("answer-pod", "STOPPED\n")
        environment = {**os.environ, "LOOK": "0.02", "FREE": self.free}
        self.agent = subprocess.Popen(
            ["sh", LEND], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(self.agent.wait)
        self.addCleanup(os.killpg, self.agent.pid, signal.SIGKILL)

    def until(self, condition):
        deadline = time.monotonic() + 20
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertTrue(condition())

    def test_an_urgent_pod_comes_and_goes(self):
        time.sleep(0.3)
        self.assertEqual(self.calls(), [])
        self.write("answer-pod", "RUNNING\n")
        self.until(lambda: os.path.exists(self.free))
        self.write("answer", "RUNNING\n")
        self.write("answer-pod", "STOPPED\n")
        self.until(lambda: self.read("train") == "RUNNING\n")
        self.assertEqual(self.calls(), ["pause train", "resume train"])
        self.assertFalse(os.path.exists(self.free))

    def test_the_gpu_is_not_free_while_a_pause_fails(self):
        self.fail("pause train")
        self.write("answer-pod", "RUNNING\n")
        self.until(lambda: self.read(".calls").count("pause train") >= 2)
        self.assertFalse(os.path.exists(self.free))
        self.fail()
        self.until(lambda: os.path.exists(self.free))
        self.assertEqual(self.read("train"), "PAUSED\n")


if __name__ == "__main__":
    unittest.main()
