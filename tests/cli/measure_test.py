"""The measure block: times without communication, rates of a large product."""
import json

import _harness as harness
from _harness import Case, tiny


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

    def test_settings_are_listed_with_defaults(self):
        settings = json.loads(self.run_binary("list", "settings", "--json").stdout)["settings"]
        by_key = {setting["key"]: setting for setting in settings}
        self.assertEqual(by_key["measure.raw_steps"]["default"], "false")
        for key in ("training.epochs", "training.optimizer.lr", "measure.without_communication", "measure.gemm_rate", "limits.timeout_s", "loader.threads", "device", "comm"):
            self.assertTrue(by_key[key]["doc"], key)
        self.assertFalse(any(key.startswith(("engine.", "workload.")) for key in by_key))
        self.assertIn("measure.raw_steps", self.run_binary("list", "settings").stdout)


if __name__ == "__main__":
    harness.main()
