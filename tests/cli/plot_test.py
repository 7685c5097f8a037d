#!/usr/bin/env python3
"""The scripts that read records: check_records.py and plot_runs.py, on generated records. Needs no binary."""

import argparse
import importlib.util
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # the source tree stays as it is
import record_samples  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CHECK = ROOT / "scripts" / "check_records.py"
PLOT = ROOT / "scripts" / "plot" / "plot_runs.py"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def call(script, *arguments):
    return subprocess.run([sys.executable, "-B", str(script), *map(str, arguments)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120, check=False)


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n", "no PNG"
    return struct.unpack(">II", head[16:24])


class RecordsCase(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="pdlbench plot ")
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)
        self.figure = self.directory / "figure.png"

    def change_run(self, run, **changes):
        record = json.loads((run / "run.json").read_text())
        record.update(changes)
        (run / "run.json").write_text(json.dumps(record))

    def change_epoch(self, run, index, **changes):
        lines = (run / "epochs.jsonl").read_text().splitlines()
        lines[index] = json.dumps({**json.loads(lines[index]), **changes})
        (run / "epochs.jsonl").write_text("\n".join(lines) + "\n")


class CheckRecords(RecordsCase):
    def assert_fails(self, directory, *texts):
        result = call(CHECK, directory)
        self.assertEqual(result.returncode, 8, result.stdout + result.stderr)
        for text in texts:
            self.assertIn(text, result.stdout)

    def test_sound_runs_pass(self):
        record_samples.write_language_run(self.directory / "a", "ddp", 4)
        record_samples.write_vision_run(self.directory / "deep" / "b", "lbann", 2)
        result = call(CHECK, self.directory)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stdout.count(": ok (status success, 6 epochs)"), 2)

    def test_committed_runs_pass(self):
        reference = ROOT / "results" / "reference"
        if not list(reference.rglob("run.json")):
            self.skipTest("no runs are committed")
        result = call(CHECK, reference)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_run_that_did_not_succeed_may_be_sound(self):
        record_samples.write_language_run(self.directory / "a", "ddp", 4, status="diverged", reason="loss is nan",
                                          epochs_planned=9)
        result = call(CHECK, self.directory)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("status diverged", result.stdout)

    def test_nothing_there(self):
        self.assertEqual(call(CHECK, self.directory).returncode, 3)

    def test_words_stand_for_what_is_not_finite(self):
        run = record_samples.write_language_run(self.directory / "a", "ddp", 1)
        self.change_epoch(run, 5, train_loss="nan", val_loss="-inf")
        self.assertEqual(call(CHECK, run).returncode, 0)
        self.change_epoch(run, 5, train_loss="lots")
        self.assert_fails(run, "epochs.jsonl line 6: train_loss: 'lots'")
        self.change_epoch(run, 5, train_loss=float("nan"))
        self.assert_fails(run, "NaN is not JSON")

    def test_types_and_fields(self):
        cases = [({"steps": 2.0}, "steps: 2.0 is no integer"), ({"steps": -1}, "steps: -1 is below 0"),
                 ({"extrapolated": 0}, "extrapolated: 0 is no boolean"), ({"train_s": 3}, "train_s: 3 is no object"),
                 ({"surprise": 1}, "surprise is not in the schema"), ({"eval_s": -1.0}, "eval_s: -1.0 is no amount"),
                 ({"schema_version": 2}, "schema_version: 2 instead of 1"),
                 ({"train_s": {"min": 1, "mean": 2}}, "train_s.max is missing"),
                 ({"train_s": {"min": 1, "mean": 9, "max": 2}}, "mean 9.0 is not between"),
                 ({"comm": {"dp.send": {"calls": 1}}}, "comm.dp.send.bytes is missing")]
        for number, (change, text) in enumerate(cases):
            run = record_samples.write_language_run(self.directory / str(number), "ddp", 2)
            self.change_epoch(run, 1, **change)
            self.assert_fails(run, text)

    def test_order_counts_and_times(self):
        run = record_samples.write_language_run(self.directory / "order", "ddp", 2)
        self.change_epoch(run, 1, epoch=2)
        self.assert_fails(run, "line 2 of epochs.jsonl is epoch 2 instead of 1")
        run = record_samples.write_language_run(self.directory / "time", "ddp", 2)
        self.change_epoch(run, 3, elapsed_s=1.0)
        self.assert_fails(run, "elapsed_s runs backwards at epoch 3")
        run = record_samples.write_language_run(self.directory / "count", "ddp", 2, epochs_planned=7)
        self.assert_fails(run, "a success with 6 of 7 epochs")
        run = record_samples.write_language_run(self.directory / "ranks", "ddp", 2)
        self.change_run(run, ranks=[])
        self.assert_fails(run, "world.ranks is 2, but 0 ranks are listed")
        run = record_samples.write_language_run(self.directory / "hash", "ddp", 2, config_hash="")
        self.assert_fails(run, "config_hash")

    def test_a_partial_last_line_is_named(self):
        run = record_samples.write_language_run(self.directory / "a", "ddp", 2)
        with open(run / "epochs.jsonl", "a", encoding="utf-8") as file:
            file.write('{"schema_version":1,"ep')
        self.assert_fails(run, "a last line of 23 bytes is not finished", "6 epochs")

    def test_a_key_that_stands_twice(self):
        run = record_samples.write_language_run(self.directory / "a", "ddp", 2)
        text = (run / "run.json").read_text()
        (run / "run.json").write_text(text.replace('"engine": "ddp"', '"engine": "ddp", "engine": "zero"'))
        self.assert_fails(run, "'engine' stands there twice")


class PlotRefusals(RecordsCase):
    def test_runs_without_success_are_named_and_refused(self):
        record_samples.write_language_run(self.directory / "good", "ddp", 2)
        record_samples.write_language_run(self.directory / "bad", "zero", 2, status="failed", reason="out of memory")
        result = call(PLOT, self.directory, "--out", self.figure)
        self.assertEqual(result.returncode, 8)
        self.assertIn("bad (gpt2-small-zero-x2) is no result: status failed: out of memory", result.stderr)
        self.assertNotIn("good", result.stderr)
        self.assertFalse(self.figure.exists())

    def test_records_that_are_not_sound_are_refused(self):
        record_samples.write_language_run(self.directory / "short", "ddp", 2, epochs_planned=7)
        result = call(PLOT, self.directory, "--out", self.figure)
        self.assertEqual(result.returncode, 8)
        self.assertIn("a success with 6 of 7 epochs", result.stderr)

    def test_nothing_to_draw(self):
        self.assertEqual(call(PLOT, self.directory, "--out", self.figure).returncode, 3)
        (self.directory / "run.json").write_text("{")
        result = call(PLOT, self.directory, "--out", self.figure)
        self.assertEqual(result.returncode, 3)
        self.assertIn("run.json", result.stderr)
        self.assertEqual(call(PLOT, self.directory).returncode, 2)


@unittest.skipUnless(HAS_MATPLOTLIB, "matplotlib is not installed")
class PlotDrawing(RecordsCase):
    def draw(self, *arguments):
        result = call(PLOT, self.directory, "--out", self.figure, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        return png_size(self.figure)

    def labels(self):
        """Labels and row titles as the script would write them, in order of the rows."""
        sys.path.insert(0, str(PLOT.parent))
        import plot_runs
        runs = plot_runs.admit(plot_runs.load([self.directory]), True)
        groups = {}
        for run in runs:
            groups.setdefault(run.group, []).append(run)
        shared = [plot_runs.set_labels(runs, members) for members in groups.values()]
        return [run.label for members in groups.values() for run in members], shared

    def test_one_row_for_each_model_and_metric(self):
        record_samples.write_language_run(self.directory / "a", "ddp", 4)
        record_samples.write_language_run(self.directory / "b", "zero", 4)
        width, height = self.draw("--title", "two engines")
        self.assertGreater(width, 1500)
        record_samples.write_vision_run(self.directory / "c", "lbann", 2)
        self.assertGreater(self.draw()[1], 1.5 * height)

    def test_partial_runs_on_demand_with_their_status(self):
        record_samples.write_language_run(self.directory / "a", "ddp", 4)
        record_samples.write_language_run(self.directory / "b", "zero", 4, status="interrupted", reason="stopped",
                                          epochs_planned=9)
        self.assertEqual(self.labels()[0], ["ddp \u00d74", "zero \u00d74 (interrupted)"])
        result = call(PLOT, self.directory, "--out", self.figure, "--allow-partial")
        self.assertEqual(result.returncode, 0, result.stderr)
        png_size(self.figure)

    def test_metrics_that_are_not_finite_leave_a_gap(self):
        run = record_samples.write_language_run(self.directory / "a", "ddp", 4)
        self.change_epoch(run, 2, val_metric={"name": "perplexity", "value": "nan"})
        self.change_epoch(run, 3, val_metric={"name": "perplexity", "value": "inf"})
        self.draw()

    def test_a_run_without_evaluation_and_without_counted_memory(self):
        run = record_samples.write_language_run(self.directory / "a", "ddp", 4, epochs=2, memory_mib=[0] * 7)
        for epoch in range(2):
            self.change_epoch(run, epoch, val_loss="nan", val_metric={"name": "perplexity", "value": "nan"})
        self.draw()

    def test_conditions_that_differ_stand_in_the_labels(self):
        record_samples.write_language_run(self.directory / "a", "serial", 1)
        record_samples.write_language_run(self.directory / "b", "ddp", 4, dtype="bf16")
        record_samples.write_language_run(self.directory / "c", "zero", 4, comm="nccl", synthetic_data=True)
        record_samples.write_vision_run(self.directory / "d", "lbann", 2)
        labels, shared = self.labels()
        self.assertEqual(labels, ["serial \u00d71 (fp32)", "ddp \u00d74 (mpi, bf16)",
                                  "zero \u00d74 (nccl, fp32, synthetic data)", "lbann \u00d72"])
        self.assertEqual(shared, ["", "mpi, fp32"])

    def test_runs_alike_are_told_apart_by_name_or_place(self):
        record_samples.write_language_run(self.directory / "a", "ddp", 4, name="first")
        record_samples.write_language_run(self.directory / "b", "ddp", 4, name="second")
        self.assertEqual(self.labels()[0], ["ddp \u00d74 (first)", "ddp \u00d74 (second)"])
        record_samples.write_language_run(self.directory / "c", "ddp", 4, name="second")
        self.assertEqual([label.split("/")[-1] for label in self.labels()[0]], ["a)", "b)", "c)"])

    def test_ranks_that_share_an_accelerator_are_marked(self):
        record_samples.write_language_run(self.directory / "a", "ddp", 4, backend="cuda", ranks_per_device=4)
        self.assertEqual(self.labels()[0], ["ddp \u00d74 (4 ranks share a GPU)"])

    def test_stale_weights_stand_in_the_label(self):
        run = record_samples.write_language_run(self.directory / "a", "pipedream", 2)
        stages = [{"stage": 0, "updates": 200, "samples_per_update": 32, "updates_behind": [1, 199], "versions": 2, "weight_drift": 0.01},
                  {"stage": 1, "updates": 200, "samples_per_update": 32, "updates_behind": [200], "versions": 1, "weight_drift": 0.0}]
        self.change_epoch(run, 5, staleness=stages)
        self.assertEqual(self.labels()[0], ["pipedream \u00d72 (weights 1, 0 updates behind)"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", help="not used")
    parser.add_argument("--launcher", help="not used")
    _, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
