"""What the command-line tests share: the real binary under the real launcher, its output, its exit code, its records."""
import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ARGS = None


def tiny(**changes):
    """A GPT-2 that trains in a second. Changes are dotted keys with __ for the dot."""
    config = {
        "name": "tiny",
        "workload": {"model": "gpt2-tiny", "layers": 1, "width": 32, "heads": 2, "sequence_length": 16, "dropout": 0.1,
                     "data": "synthetic-learnable", "vocabulary_size": 50, "train_samples": 96, "validation_samples": 24},
        "engine": {"name": "ddp"},
        "training": {"epochs": 2, "global_batch_size": 12, "optimizer": {"name": "adamw", "lr": 0.003}},
        "limits": {"timeout_s": 20},
    }
    for key, value in changes.items():
        target = config
        *parents, last = key.split("__")
        for parent in parents:
            target = target.setdefault(parent, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return config


TINY_VGG = {"model": "vgg11", "width_multiplier": 0.0625, "image_size": 32, "classifier_width": 16, "data": "synthetic-learnable",
            "classes": 4, "train_samples": 96, "validation_samples": 24}


class Case(unittest.TestCase):
    """A temporary folder per test, and ways to run the binary."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="pdlbench-cli-")

    def tearDown(self):
        subprocess.run(["rm", "-rf", self.folder], check=False)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, config, name="config.json"):
        with open(self.path(name), "w") as file:
            file.write(config if isinstance(config, str) else json.dumps(config, indent=2))
        return self.path(name)

    def command(self, ranks, arguments):
        launcher = shlex.split(ARGS.launcher) + [str(ranks)] if ranks > 0 else []
        return [*launcher, ARGS.binary, *arguments]

    def run_binary(self, *arguments, ranks=0, timeout=120, env=None):
        return subprocess.run(self.command(ranks, arguments), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout,
                              env={**os.environ, **(env or {})}, cwd=self.folder)

    def start(self, *arguments, ranks=0):
        return subprocess.Popen(self.command(ranks, arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True)

    def train(self, config, *arguments, ranks=0, out="out", **keywords):
        return self.run_binary("run", self.write(config), *arguments, "--out", self.path(out), ranks=ranks, **keywords)

    def assert_fails(self, done, code, *phrases):
        text = done.stdout + done.stderr
        self.assertEqual(done.returncode, code, text)
        for phrase in phrases:
            self.assertIn(phrase, text)

    def epochs(self, out="out"):
        with open(os.path.join(self.path(out), "epochs.jsonl")) as file:
            return [json.loads(line) for line in file]

    def run_json(self, out="out"):
        with open(os.path.join(self.path(out), "run.json")) as file:
            return json.load(file)

    def wait_for_epochs(self, process, count, out="out", seconds=60):
        """Until that many epochs are recorded."""
        deadline = time.monotonic() + seconds
        path = os.path.join(self.path(out), "epochs.jsonl")
        while time.monotonic() < deadline:
            if os.path.exists(path):
                with open(path) as file:
                    if file.read().count("\n") >= count:
                        return
            if process.poll() is not None:
                self.fail("ended early: " + process.stderr.read())
            time.sleep(0.05)
        self.fail(f"no {count} epochs after {seconds} s")

    def ranks_of(self, process):
        """Process ids of the ranks, in rank order, found by the launcher's variables."""
        ranks = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    environment = dict(e.split(b"=", 1) for e in file.read().split(b"\0") if b"=" in e)
                executable = os.readlink(f"/proc/{pid}/exe")
                group = os.getsid(int(pid))
            except (OSError, ValueError):
                continue
            rank = environment.get(b"PMI_RANK", environment.get(b"OMPI_COMM_WORLD_RANK"))
            if rank is not None and executable == os.path.realpath(ARGS.binary) and environment.get(b"PWD", b"").decode() and \
                    os.path.realpath(f"/proc/{pid}/cwd") == os.path.realpath(self.folder):
                ranks[int(rank)] = int(pid)
        return [ranks[r] for r in sorted(ranks)]

    @staticmethod
    def stop(process):
        """Asks for a stop through the launcher. Open MPI's ends with a code of its own after SIGTERM, but passes SIGUSR1 on."""
        process.send_signal(signal.SIGUSR1 if "openmpi" in ARGS.launcher else signal.SIGTERM)

    def finish(self, process, seconds):
        """Waits; returns (code, output). Whatever is left is killed, and that is a failure."""
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"still running after {seconds} s")
        return process.returncode, out + err

    def assert_resume_continues(self, config, ranks):
        """A run of several epochs that is stopped after its first and resumed has the losses of one that was not."""
        for out in ("whole", "broken"):
            subprocess.run(["rm", "-rf", self.path(out)], check=True)
        self.assertEqual(self.train(config, ranks=ranks, out="whole").returncode, 0)
        process = self.start("run", self.path("config.json"), "--out", self.path("broken"), ranks=ranks)
        self.wait_for_epochs(process, 1, "broken")
        self.stop(process)
        code, text = self.finish(process, 20)
        if code == 0:
            self.skipTest("the run was over before it could be stopped")
        self.assertEqual(code, 75, text)
        self.assertEqual(self.run_json("broken")["status"], "interrupted")
        done = self.run_binary("run", self.path("config.json"), "--resume", "--out", self.path("broken"), ranks=ranks)
        self.assertEqual(done.returncode, 0, done.stderr)
        resumed, whole = ([[epoch[field] for field in ("epoch", "train_loss", "val_loss", "loss_scale")] for epoch in self.epochs(out)]
                          for out in ("broken", "whole"))
        self.assertEqual(resumed, whole)

    def assert_time_is_accounted_for(self, epoch):
        """Each rank of the pipeline spent all of its time, and the shares are those of all ranks together. Returns the ranks."""
        pipeline, ranks = epoch["pipeline"], epoch["pipeline"]["ranks"]
        self.assertEqual([rank["rank"] for rank in ranks], list(range(len(ranks))))
        idle, useful, all_s = 0.0, 0.0, sum(rank["train_s"] for rank in ranks)
        for rank in ranks:
            waits, comm = rank["wait_s"], rank["comm_s"]
            work = [rank[key] for key in ("forward_s", "backward_s", "recompute_s", "optimizer_s", "other_s")]
            self.assertAlmostEqual(sum(work) + sum(waits.values()) + sum(comm.values()), rank["train_s"], delta=1e-6)
            for key in ("forward_s", "backward_s", "optimizer_s", "other_s"):
                self.assertGreater(rank[key], 0.0)
            idle += sum(waits.values()) + comm["outside"]
            useful += rank["forward_s"] + rank["backward_s"]
        self.assertAlmostEqual(all_s / len(ranks), epoch["train_s"]["mean"], delta=1e-6)
        self.assertAlmostEqual(pipeline["idle_fraction"], idle / all_s)
        self.assertAlmostEqual(pipeline["useful_fraction"], useful / all_s)
        simulated = pipeline["simulated"]
        self.assertTrue(0.0 < simulated["train_s"] < 1.5 * epoch["train_s"]["max"], simulated)
        self.assertTrue(0.0 < simulated["useful_fraction"] <= 1.0 - simulated["idle_fraction"] < 1.0, simulated)
        return ranks

    def assert_divergence_ends_all(self, config, ranks):
        """With a learning rate beyond reason: one message, the code of a numeric failure, a record that says so."""
        config["training"]["optimizer"] = {"name": "sgd", "lr": 1e6}
        done = self.train(config, ranks=ranks)
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertIn("stopped being finite", done.stderr)
        self.assertEqual(done.stderr.count("error:"), 1, done.stderr)
        self.assertEqual(self.run_json()["status"], "diverged")


def main():
    global ARGS
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", required=True)
    parser.add_argument("--launcher", required=True, help="command before the number of ranks, for instance 'mpiexec -n'")
    ARGS, rest = parser.parse_known_args()
    ARGS.binary = os.path.abspath(ARGS.binary)
    unittest.main(module="__main__", argv=[sys.argv[0], *rest])
