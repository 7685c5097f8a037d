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
