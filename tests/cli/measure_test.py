"""The measure block: times without communication."""
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


class Records(Case):
    def test_exposed_communication_of_a_step(self):
        done = self.train(tiny(training__epochs=1), ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        epoch = self.epochs()[0]
        self.assertGreater(epoch["comm_exposed_step_ms"], 0)
        self.assertLess(epoch["comm_exposed_step_ms"], epoch["step_ms"]["max"])


if __name__ == "__main__":
    harness.main()
