"""The measure block: traces, times without communication, rates of a large product."""
import json
import os

import _harness as harness
from _harness import Case, tiny

PHASES = {"data", "forward", "backward", "communication", "optimizer", "other"}


def nanoseconds(microseconds):
    return round(microseconds * 1000)


class Trace(Case):
    def trace(self, config, ranks):
        done = self.train(config, ranks=ranks)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("out/trace.json")) as file:
            return json.load(file)["traceEvents"]

    def spans(self, events, rank, row):
        """(name, begin, end) in nanoseconds, in order."""
        rows = {event["tid"]: event["args"]["name"] for event in events
                if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == rank}
        found = [(e["name"], nanoseconds(e["ts"]), nanoseconds(e["ts"]) + nanoseconds(e["dur"])) for e in events
                 if e["ph"] == "X" and e["pid"] == rank and rows[e["tid"]] == row]
        return sorted(found, key=lambda span: (span[1], -span[2]))

    def assert_nested(self, spans):
        """Each span lies inside or beside every other of its row."""
        open_until = []
        for name, begin, end in spans:
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            if open_until:
                self.assertLessEqual(end, open_until[-1], name)
            open_until.append(end)

    def test_steps_hold_their_phases_without_a_gap(self):
        # 8 steps an epoch: 2 of warm-up, 3 drawn.
        events = self.trace(tiny(measure={"warmup_steps": 2, "trace": 3}, training__micro_batch_size=2), ranks=2)
        for rank in range(2):
            spans = self.spans(events, rank, "steps and phases")
            self.assert_nested(spans)
            steps = [span for span in spans if span[0].startswith("step ")]
            self.assertEqual([step[0] for step in steps], ["step 2", "step 3", "step 4"])
            for _, begin, end in steps:
                inside = [span for span in spans if span[0] in PHASES and begin <= span[1] and span[2] <= end]
                self.assertEqual(sum(span[2] - span[1] for span in inside), end - begin)
                self.assertLessEqual({"data", "forward", "backward", "communication", "optimizer"}, {s[0] for s in inside})
                self.assertEqual([s[0] for s in inside].count("backward"), 3)
            tasks = self.spans(events, rank, "schedule")
            self.assertEqual([task[0] for task in tasks], 3 * ["micro-batch 0", "micro-batch 1", "micro-batch 2"])
            self.assert_nested(tasks)

    def test_communication_and_memory(self):
        events = self.trace(tiny(measure={"warmup_steps": 2, "trace": 2}), ranks=2)  # the first two exchange more
        self.assertEqual(sorted({e["args"]["name"] for e in events if e["name"] == "process_name"})[0][:8], "rank 0 (")
        for rank in range(2):
            mine = [event for event in events if event["pid"] == rank]
            waits = self.spans(events, rank, "waiting for communication")
            self.assert_nested(waits)
            self.assertEqual({wait[0] for wait in waits}, {"world.all_reduce", "control.all_reduce"})
            steps = [span for span in self.spans(events, rank, "steps and phases") if span[0].startswith("step ")]
            slack = 10_000  # phases and waits read the clock one after the other
            for _, begin, end in waits:
                self.assertTrue(any(b - slack <= begin and end <= e + slack for _, b, e in steps))
            begun = [event for event in mine if event["ph"] == "b"]
            ended = {event["id"]: event for event in mine if event["ph"] == "e"}
            self.assertEqual(len(begun), len(ended))
            self.assertEqual([e["name"] for e in begun].count("control.all_reduce"), 2)
            for event in begun:
                self.assertGreaterEqual(ended[event["id"]]["ts"], event["ts"])
                self.assertGreater(event["args"]["bytes"], 0)
            memory = [event for event in mine if event["ph"] == "C"]
            self.assertEqual(len(memory), 4)  # where each step begins and ends
            self.assertGreater(memory[0]["args"]["parameters"], 0)

    def test_drawn_steps_are_no_statistics_and_no_trace_is_the_default(self):
        self.trace(tiny(measure={"warmup_steps": 1, "trace": 2, "raw_steps": True}, training__epochs=1), ranks=1)
        with open(self.path("out/steps.csv")) as file:
            rows = [line.strip().split(",") for line in file]
        self.assertEqual(rows[0], ["epoch", "step", "step_ms", "comm_exposed_ms"])
        counted = sorted(float(row[2]) for row in rows[1:][3:])
        step = self.epochs()[0]["step_ms"]
        self.assertAlmostEqual(step["min"], counted[0], places=6)
        self.assertAlmostEqual(step["max"], counted[-1], places=6)
        self.assertEqual(self.train(tiny(training__epochs=1), "--force").returncode, 0)
        self.assertFalse(os.path.exists(self.path("out/trace.json")))

    def test_fewer_steps_than_asked_for(self):
        events = self.trace(tiny(measure={"trace": 100}, training__epochs=1), ranks=1)
        steps = [span for span in self.spans(events, 0, "steps and phases") if span[0].startswith("step ")]
        self.assertEqual(len(steps), 5)  # of 8, 3 are warm-up

    def test_a_window_over_the_end_of_an_epoch(self):
        events = self.trace(tiny(measure={"warmup_steps": 7, "trace": 3}), ranks=2)
        for rank in range(2):
            spans = self.spans(events, rank, "steps and phases")
            self.assertEqual([span[0] for span in spans if span[0].startswith("step ")], ["step 7", "step 0", "step 1"])
            self.assert_nested(spans)


class WithoutCommunication(Case):
    def test_is_marked_as_no_result(self):
        config = tiny(measure__without_communication=True)
        done = self.train(config, ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout.splitlines()[-1],
                         r"^RESULT INVALID reason=without_communication engine=ddp ranks=2 step_ms=[0-9.e-]+ ")
        run = self.run_json()
        self.assertEqual(run["status"], "benchmark")
        self.assertIn("without_communication", run["reason"])
        last = self.epochs()[-1]
        self.assertEqual(set(last["comm"]), {"control.all_reduce"})
        self.assertGreater(last["step_ms"]["median"], 0)
        rows = json.loads(self.run_binary("report", self.path("out"), "--format", "json").stdout)["runs"]
        self.assertEqual(rows[0]["status"], "benchmark")
        self.assertIsNone(rows[0]["step_ms"])
        self.assertIsNone(rows[0]["val_metric"])

    def test_replicas_drift_apart(self):
        """Else the run would still exchange gradients."""
        done = self.run_binary("verify", self.write(tiny(training__dtype="fp64", measure__without_communication=True)), ranks=2)
        self.assertEqual(done.returncode, 8, done.stdout + done.stderr)


class GemmRate(Case):
    def test_is_measured_on_request(self):
        config = tiny(measure__gemm_rate=True, training__epochs=1)
        done = self.train(config, ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        rate = self.run_json()["gemm_flops_per_s"]
        self.assertGreater(rate, 1e8)
        epoch = self.epochs()[0]
        self.assertAlmostEqual(epoch["of_gemm"] / (epoch["flops_per_s"] / rate), 1.0, places=9)
        self.assertIn("of a large product", done.stderr)
        done = self.train(tiny(training__epochs=1), "--force")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("gemm_flops_per_s", self.run_json())
        self.assertNotIn("of_gemm", self.epochs()[0])

    def test_does_not_count_as_memory_of_the_training(self):
        totals = []
        for rate in (False, True):
            done = self.train(tiny(measure__gemm_rate=rate, training__epochs=1), "--force")
            self.assertEqual(done.returncode, 0, done.stderr)
            totals.append(self.epochs()[0]["memory_peak_bytes"]["total"]["max"])
        self.assertEqual(totals[0], totals[1])


class Records(Case):
    def test_median_throughput_and_exposed_communication(self):
        done = self.train(tiny(training__epochs=1), ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        epoch = self.epochs()[0]
        self.assertAlmostEqual(epoch["samples_per_s_median"], 12 / epoch["step_ms"]["median"] * 1000.0, places=6)
        self.assertAlmostEqual(epoch["tokens_per_s_median"], 16 * epoch["samples_per_s_median"], places=6)
        self.assertGreater(epoch["comm_exposed_step_ms"], 0)
        self.assertLess(epoch["comm_exposed_step_ms"], epoch["step_ms"]["max"])
        self.assertIn("PaLM", self.run_json()["palm_formula"])
        self.assertEqual(self.run_json()["world"]["gpus"], 0)

    def test_settings_are_listed_with_defaults(self):
        settings = json.loads(self.run_binary("list", "settings", "--json").stdout)["settings"]
        by_key = {setting["key"]: setting for setting in settings}
        self.assertEqual(by_key["measure.trace"]["default"], "0")
        for key in ("training.epochs", "training.optimizer.lr", "measure.without_communication", "measure.nvtx",
                    "measure.gemm_rate", "limits.timeout_s", "loader.threads", "device", "comm"):
            self.assertTrue(by_key[key]["doc"], key)
        self.assertFalse(any(key.startswith(("engine.", "workload.")) for key in by_key))
        self.assertIn("measure.trace", self.run_binary("list", "settings").stdout)

    def test_ranges_for_a_profiler_need_a_gpu(self):
        self.assert_fails(self.train(tiny(measure__nvtx=True, device="cpu")), 2, "/measure/nvtx", "set it to false")

    def test_too_long_a_trace(self):
        self.assert_fails(self.train(tiny(measure__trace=101)), 2, "/measure/trace", "100")


if __name__ == "__main__":
    harness.main()
