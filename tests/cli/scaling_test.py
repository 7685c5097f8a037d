#!/usr/bin/env python3
"""scripts/bench/scaling.py with the real binary on the CPU, and the figure of what it measured."""
import json
import os
import pathlib
import subprocess
import sys
import unittest

import _harness as harness

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"
SMALL = {"model": "gpt2-tiny", "layers": 1, "width": 32, "heads": 2, "sequence_length": 16, "data": "synthetic",
         "vocabulary_size": 50, "train_samples": 4000, "validation_samples": 8}


class Scaling(harness.Case):
    def measure(self, *options, out="out", expected=0):
        done = subprocess.run(
            [sys.executable, "-B", str(SCRIPTS / "bench" / "scaling.py"), "--out", self.path(out), "--binary", harness.ARGS.binary,
             "--launcher", harness.ARGS.launcher, "--device", "cpu", "--comm", "mpi", "--skip-peers", "--only", "gpt2-t1024",
             "--steps", "3", "--warmup", "1", *options, "--set", "workload=" + json.dumps(SMALL), "training.dtype=fp32"],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
        self.assertEqual(done.returncode, expected, done.stdout + done.stderr)
        return done

    def measured(self, out="out"):
        with open(os.path.join(self.path(out), "scaling.json")) as file:
            return json.load(file)

    def test_engines_are_verified_timed_and_drawn(self):
        done = self.measure("--ranks", "1", "2", "--engines", "ddp", "megatron-intra", "pipedream")
        rows = self.measured()["rows"]
        timed = {(row["engine"], row["ranks"]): row for row in rows if "engine" in row}
        self.assertEqual(set(timed), {("serial", 1), ("ddp", 2), ("megatron-intra", 2), ("pipedream", 2)})
        self.assertEqual({row["verified"] for row in rows if "verified" in row}, {"ddp", "megatron-intra", "pipedream"})
        for (engine, ranks), row in timed.items():
            self.assertIn(engine, done.stdout)
            self.assertAlmostEqual(row["efficiency"] * ranks, row["per_s"] / timed["serial", 1]["per_s"])
            self.assertAlmostEqual(row["per_s"], 16 * 16 * ranks / row["step_ms"]["median"] * 1e3)
            self.assertTrue(os.path.exists(os.path.join(self.path("out"), row["record"], "run.json")))
        self.assertGreater(timed["ddp", 2]["comm"]["world.all_reduce"]["bytes"], 0)

        figure = self.path("scaling.png")
        done = subprocess.run([sys.executable, "-B", str(SCRIPTS / "plot" / "scaling.py"), self.path("out") + "/scaling.json", "--out", figure],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(os.path.getsize(figure), 10000)

    def test_a_second_call_measures_only_what_is_missing(self):
        self.measure("--ranks", "1")
        first = self.measured()["rows"]
        self.measure("--ranks", "1", "2", "--engines", "ddp")
        rows = self.measured()["rows"]
        self.assertEqual(rows[:1], first)
        self.assertEqual([row["engine"] for row in rows if "engine" in row], ["serial", "ddp"])

    def test_what_does_not_fit_into_the_limit_is_left_out_by_name(self):
        done = self.measure("--ranks", "1", "2", "--engines", "ddp", "--limit", "1")
        self.assertIn("left out for want of time: gpt2-t1024, serial on 1", done.stderr)
        self.assertIn("verify of gpt2-t1024, ddp on 2", self.measured()["left_out"])

    def test_what_fails_is_said_and_the_rest_is_measured(self):
        done = self.measure("--ranks", "1", "3", "--engines", "ddp", "megatron-intra", expected=1)
        self.assertEqual([row["engine"] for row in self.measured()["rows"] if "engine" in row], ["serial", "ddp"])
        self.assertIn("megatron-intra on 3 failed: code ", done.stderr)


if __name__ == "__main__":
    harness.main()
