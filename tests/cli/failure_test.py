"""Ranks that die, hang or are told to stop: the job ends soon, with its code, and what was recorded stays."""
import json
import os
import re
import signal
import time

import _harness as harness
from _harness import Case, tiny

LONG = dict(training__epochs=100000, training__checkpoint_every_epochs=0, limits__timeout_s=4)


class Failure(Case):
    def start_training(self, ranks, **changes):
        os.system(f"rm -rf {self.path('out')}")
        process = self.start("run", self.write(tiny(**LONG, **changes)), "--out", self.path("out"), ranks=ranks)
        self.wait_for_epochs(process, 2)
        pids = self.ranks_of(process)
        self.assertEqual(len(pids), ranks)
        return process, pids

    def assert_records_intact(self):
        with open(self.path("out/epochs.jsonl")) as file:
            lines = file.read().split("\n")
        for line in lines[:-1]:
            json.loads(line)
        self.assertGreaterEqual(len(lines) - 1, 2)
        self.assertNotEqual(self.run_json()["status"], "success")

    def assert_gone(self, pids):
        deadline = time.monotonic() + 5
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual([pid for pid in pids if os.path.exists(f"/proc/{pid}")], [])

    def test_a_killed_rank_ends_the_job(self):
        for ranks, victim in ((2, 1), (3, 0)):
            process, pids = self.start_training(ranks)
            os.kill(pids[victim], signal.SIGKILL)
            code, _ = self.finish(process, 10)
            self.assertNotEqual(code, 0)
            self.assert_gone(pids)
            self.assert_records_intact()
            os.system(f"rm -rf {self.path('out')}")

    def test_a_stopped_rank_is_named_and_the_job_ends(self):
        process, pids = self.start_training(3)
        os.kill(pids[1], signal.SIGSTOP)
        code, text = self.finish(process, 10)
        self.assertEqual(code, 6, text)
        self.assertRegex(text, r"rank 1\b")
        self.assertRegex(text, r"in vain for \w+ .*operation \d+")  # whichever it was in when it was stopped
        self.assertEqual(text.count("error:"), 1, text)
        self.assert_gone(pids)
        self.assert_records_intact()

    def test_a_stage_that_dies_stops_or_is_told_to_ends_a_pipeline(self):
        for engine in ({"name": "torchgpipe", "chunks": 4}, {"name": "pipedream"}):
            for victim in range(3):
                with self.subTest(engine=engine["name"], killed=victim):
                    process, pids = self.start_training(3, engine=engine)
                    os.kill(pids[victim], signal.SIGKILL)
                    self.assertNotEqual(self.finish(process, 10)[0], 0)
                    self.assert_gone(pids)
                    self.assert_records_intact()
                    os.system(f"rm -rf {self.path('out')}")
            with self.subTest(engine=engine["name"], stopped=1):
                process, pids = self.start_training(3, engine=engine)
                os.kill(pids[1], signal.SIGSTOP)
                code, text = self.finish(process, 10)
                self.assertEqual(code, 6, text)
                # The first to lose patience may be one that waits for a neighbour of the stage that stands still.
                self.assertRegex(text, r"rank [02] waited .* in vain for \w+ ")
                self.assertEqual(text.count("error:"), 1, text)
                self.assert_gone(pids)
                os.system(f"rm -rf {self.path('out')}")
            with self.subTest(engine=engine["name"], told=1):
                process, pids = self.start_training(3, engine=engine)
                os.kill(pids[1], signal.SIGTERM)
                code, text = self.finish(process, 10)
                self.assertEqual(code, 75, text)
                self.assertEqual(self.run_json()["status"], "interrupted")
                self.assert_gone(pids)
                os.system(f"rm -rf {self.path('out')}")

    def test_a_stopped_rank_is_named_with_nccl(self):
        cuda = json.loads(self.run_binary("info", "--json").stdout)["cuda"]
        if not re.search(r" [2-9]\d* visible", cuda):
            self.skipTest("needs two GPUs")
        process, pids = self.start_training(2, device="cuda", comm="nccl")
        os.kill(pids[1], signal.SIGSTOP)
        code, text = self.finish(process, 30)
        self.assertEqual(code, 6, text)
        self.assertRegex(text, r"rank 0 waited .* in vain for \w+ .*operation \d+.*rank 1 has")
        self.assertEqual(text.count("error:"), 1, text)
        self.assert_gone(pids)
        self.assert_records_intact()
        self.assertEqual(self.run_json()["status"], "failed")

    def test_sigterm_stops_cleanly(self):
        process, pids = self.start_training(2)
        self.stop(process)
        code, text = self.finish(process, 10)
        self.assertEqual(code, 75, text)
        self.assertEqual(self.run_json()["status"], "interrupted")
        self.assertIn("RESULT INVALID reason=interrupted", text)
        self.assert_gone(pids)
        self.assert_records_intact()

    def test_divergence(self):
        vgg = {"model": "vgg11", "width_multiplier": 0.0625, "image_size": 32, "classifier_width": 16, "data": "synthetic-learnable",
               "classes": 4, "train_samples": 96, "validation_samples": 24}
        done = self.train(tiny(workload=vgg, training__optimizer={"name": "sgd", "lr": 1e6}), ranks=2)
        self.assert_fails(done, 7, "stopped being finite", "RESULT INVALID reason=numeric")
        self.assertEqual(self.run_json()["status"], "diverged")

    def test_a_loss_scale_that_cannot_fall(self):
        config = tiny(training__dtype="fp64", training__loss_scale={"name": "static", "scale": 1e300})
        done = self.train(config, ranks=2)
        self.assert_fails(done, 7, "not finite in 10 steps in a row", "training.loss_scale", "RESULT INVALID reason=numeric")
        self.assertEqual(self.run_json()["status"], "diverged")
        self.assertEqual([epoch["skipped_steps"] for epoch in self.epochs()], [8])

    def test_out_of_memory_has_a_table(self):
        done = self.train(tiny(limits__memory_limit_mb=1, workload__width=256), ranks=2)
        self.assert_fails(done, 5, "parameters", "activations", "neither smaller micro-batches nor recomputation")

    def test_what_the_advice_says_fits(self):
        config = tiny(limits__memory_limit_mb=3, workload__width=64, workload__sequence_length=64)
        done = self.train(config, ranks=2)
        self.assert_fails(done, 5, "would fit, cheapest first")
        advice = [line.strip().split(" (")[0].split() for line in done.stderr.splitlines() if "=" in line and " MiB)" in line]
        self.assertGreaterEqual(len(advice), 1, done.stderr)
        for overrides in advice:
            kept = self.train(config, *overrides, ranks=2, out="_".join(overrides).replace("/", "-"))
            self.assertEqual(kept.returncode, 0, kept.stderr)

    def test_a_second_run_in_the_same_place_is_refused(self):
        process, _ = self.start_training(1)
        done = self.run_binary("run", self.path("config.json"), "--force", "--out", self.path("out"))
        self.assert_fails(done, 2, "out")
        self.stop(process)
        self.finish(process, 10)


if __name__ == "__main__":
    harness.main()
