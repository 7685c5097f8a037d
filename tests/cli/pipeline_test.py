"""Pipelines from the command line: a run with its records, stop and resume, plans, measured layer times, and mistakes."""
import json
import os

import _harness as harness
from _harness import Case, tiny

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def pipeline(**changes):
    return tiny(engine={"name": "torchgpipe", "chunks": 4}, **changes)


class Pipeline(Case):
    def test_records(self):
        done = self.train(pipeline(), ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        run, last = self.run_json(), self.epochs()[-1]
        self.assertEqual((run["world"]["pp"], run["world"]["dp"]), (3, 1))
        self.assertEqual(run["engine_description"]["micro_batches"], 4)
        self.assertGreater(last["bubble_fraction"], 0.0)
        self.assertLess(last["bubble_fraction"], 1.0)
        self.assertEqual(last["comm"]["pp.send"]["calls"], 8 * 8, "4 activations and 4 gradients from the middle in 8 steps")
        self.assertIn("tied.all_reduce", last["comm"])

    def test_where_the_time_goes(self):
        for checkpoint, recomputed in (("never", 0), ("except_last", 3), ("always", 4)):
            done = self.train(pipeline(engine__checkpoint=checkpoint), ranks=3, out=checkpoint)
            self.assertEqual(done.returncode, 0, done.stderr)
            last = self.epochs(checkpoint)[-1]
            ranks = self.assert_time_is_accounted_for(last)
            self.assertEqual([(rank["stage"], rank["replica"]) for rank in ranks], [(0, 0), (1, 0), (2, 0)])
            for rank in ranks:
                (passes,) = rank["passes"]
                self.assertEqual(passes["forward"]["count"], 8 * 4, "4 micro-batches in 8 steps")
                self.assertEqual(passes["backward"]["count"], 8 * 4)
                self.assertEqual(passes.get("recompute", {"count": 0})["count"], 8 * recomputed)
                self.assertEqual(rank["recompute_s"] > 0.0, recomputed > 0)
                self.assertAlmostEqual(passes["forward"]["total_s"], rank["forward_s"], delta=1e-9)
            # The pipeline fills from the first stage on, and drains to it.
            self.assertGreater(ranks[2]["wait_s"]["warm_up"], ranks[0]["wait_s"]["warm_up"])
            self.assertGreater(ranks[0]["wait_s"]["drain"], ranks[2]["wait_s"]["drain"])
            self.assertEqual([rank["wait_s"]["steady"] for rank in ranks], [0.0] * 3, "forwards all come before backwards")
            self.assertAlmostEqual(last["pipeline"]["closed_form_idle_fraction"], 2 / (4 + 2))
            self.assertNotIn("planned_s", last["pipeline"])
            self.assertIn(", pipeline idle ", done.stderr)
        table = self.run_binary("report", self.path("never"), self.path("always"))
        self.assertEqual(table.returncode, 0, table.stderr)
        self.assertRegex(table.stdout, r"pipeline +forward +backward +recompute +warm-up +steady +drain +comm +update +idle")
        self.assertEqual(table.stdout.count(" 33.3% "), 2, table.stdout)
        (row,) = json.loads(self.run_binary("report", self.path("never"), "--format", "json").stdout)["runs"]
        self.assertIn(row["pipeline_idle_fraction"], [epoch["pipeline"]["idle_fraction"] for epoch in self.epochs("never")])

    def test_time_of_a_loss_that_is_computed_apart(self):
        done = self.train(pipeline(engine__loss_in_pipeline=False), ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        first, last = self.assert_time_is_accounted_for(self.epochs()[-1])
        self.assertNotIn("loss", first["passes"][0])
        self.assertEqual(last["passes"][0]["loss"]["count"], 8 * 4)

    def test_time_of_a_grid(self):
        for ranks, knobs, stages, chunks in ((2, {"virtual_pipeline_model_parallel_size": 2}, [0, 1], 2),
                                             (4, {"tensor_model_parallel_size": 2}, [0, 0, 1, 1], 1),
                                             (4, {}, [0, 0, 1, 1], 1)):
            config = tiny(engine={"name": "megatron", "pipeline_model_parallel_size": 2, **knobs}, training__micro_batch_size=3)
            out = f"{ranks}-{len(knobs)}-{chunks}"
            done = self.train(config, ranks=ranks, out=out)
            self.assertEqual(done.returncode, 0, done.stderr)
            last = self.epochs(out)[-1]
            entries = self.assert_time_is_accounted_for(last)
            self.assertEqual([rank["stage"] for rank in entries], stages)
            self.assertEqual([rank["replica"] for rank in entries], [0, 1, 0, 1] if out == "4-0-1" else [0] * ranks)
            self.assertEqual([len(rank["passes"]) for rank in entries], [chunks] * ranks)
            divides_layers = "tensor_model_parallel_size" in knobs
            self.assertEqual([rank["comm_s"]["passes"] > 0.0 for rank in entries], [divides_layers] * ranks)
            micro_batches = 2 if out == "4-0-1" else 4
            self.assertAlmostEqual(last["pipeline"]["closed_form_idle_fraction"], 1 / (chunks * micro_batches + 1))

    def test_without_a_pipeline_there_is_none_to_account_for(self):
        for config, ranks in ((pipeline(), 1), (tiny(engine={"name": "megatron"}), 2), (tiny(), 2)):
            name = config["engine"]["name"]
            done = self.train(config, ranks=ranks, out=name)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("pipeline", self.epochs(name)[-1])
            self.assertNotIn("warm-up", self.run_binary("report", self.path(name)).stdout)

    def test_resume_continues_bit_for_bit(self):
        self.assert_resume_continues(pipeline(training__epochs=4), ranks=2)

    def test_verify(self):
        done = self.run_binary("verify", self.write(pipeline(training__dtype="fp64")), ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("VERIFY PASSED engine=torchgpipe reference=serial ranks=3", done.stdout)

    def test_layer_times_decide_the_cut(self):
        done = self.run_binary("profile", self.write(pipeline(training__micro_batch_size=3)), "--out", self.path("times.json"))
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("times.json")) as file:
            profile = json.load(file)
        self.assertEqual(list(profile["layers"]), ["embedding", "h.0", "ln_f", "lm_head"])
        self.assertEqual(profile["samples"], 3)
        # A head that takes for ever gets a stage of its own.
        profile["layers"]["lm_head"]["backward_ns"] = 10 ** 12
        self.write(profile, "edited.json")
        done = self.train(pipeline(), "engine.balance_by=time", "engine.profile=" + self.path("edited.json"), ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.run_json()["engine_description"]["knobs"]["balance"], "[3, 1]")
        # 1000 s for each of 4 micro-batches in 8 steps, and hardly anything else
        self.assertAlmostEqual(self.epochs()[-1]["pipeline"]["planned_s"] / (8 * 4 * 1000), 1.0, delta=0.01)

    def test_a_failing_stage_ends_all_ranks_with_one_message(self):
        self.assert_divergence_ends_all(pipeline(workload=harness.TINY_VGG), ranks=3)

    def test_mistakes_end_before_anything_starts(self):
        self.assert_fails(self.train(pipeline(), ranks=5), 2, "has only 4 layers to divide; start at most 4 ranks")
        self.assert_fails(self.train(pipeline(), "engine.balance=[1,1]", ranks=2), 2, "adds up to 2, the model has 4 layers",
                          "nearest: [2, 2]")
        self.assertFalse(os.path.exists(self.path("out")))

    def test_study_plans(self):
        for config, ranks, first, last in (("torchgpipe_gpt2_medium", 4, 8, 5), ("torchgpipe_vgg16", 4, 4, 12)):
            done = self.run_binary("plan", os.path.join(ROOT, f"configs/study/{config}.json"), "--ranks", str(ranks), "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            plan = json.loads(done.stdout)
            self.assertEqual(plan["micro_batches"], 4 * ranks)
            stages = plan["tables"][0]["rows"]
            self.assertEqual((int(stages[0][1]), int(stages[-1][1])), (first, last))
            self.assertEqual(sum(int(row[6]) for row in stages), plan["parameters"])


if __name__ == "__main__":
    harness.main()
