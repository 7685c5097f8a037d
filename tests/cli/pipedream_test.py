"""PipeDream from the command line: records with staleness, stop and resume, verification, a loss that ends all ranks."""
import json

import _harness as harness
from _harness import Case, tiny


def pipedream(**changes):
    return tiny(engine={"name": "pipedream"}, **changes)


class PipeDream(Case):
    def test_records_say_how_stale_weights_are(self):
        done = self.train(pipedream(), ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        run, last = self.run_json(), self.epochs()[-1]
        self.assertEqual((run["world"]["pp"], run["world"]["dp"]), (3, 1))
        self.assertEqual([stage["stage"] for stage in last["staleness"]], [0, 1, 2])
        for stage, lag in zip(last["staleness"], (2, 1, 0)):
            self.assertEqual(stage["updates"], last["steps"])
            self.assertEqual(stage["updates_behind"], [1] * lag + [last["steps"] - lag], "late only once the pipeline is full")
            self.assertEqual(stage["versions"], lag + 1)
            self.assertEqual(stage["weight_drift"] > 0.0, lag > 0)
        self.assertIn("tied.send", last["comm"])

    def test_where_the_time_goes(self):
        for mode in ("stash", "none", "published", "vertical_sync", "2bw", "flush"):
            config = pipedream(engine__mode=mode)
            if mode == "published":
                config["training"]["optimizer"] = {"name": "sgd", "lr": 0.01}
            if mode in ("2bw", "flush"):
                config["engine"]["micro_batches"] = 4
            done = self.train(config, ranks=3, out=mode)
            self.assertEqual(done.returncode, 0, done.stderr)
            last = self.epochs(mode)[-1]
            ranks = self.assert_time_is_accounted_for(last)
            self.assertEqual([rank["stage"] for rank in ranks], [0, 1, 2])
            units = last["steps"] * (4 if mode in ("2bw", "flush") else 1)
            for rank in ranks:
                self.assertEqual(rank["recompute_s"], 0.0)
                self.assertEqual(rank["passes"][0]["backward"]["count"], units)
            self.assertGreater(ranks[0]["wait_s"]["drain"], 0.0)
            self.assertGreater(ranks[2]["wait_s"]["warm_up"], 0.0)
            self.assertGreater(ranks[1]["wait_s"]["steady"], 0.0)
            in_a_row = 4 if mode == "flush" else units
            self.assertAlmostEqual(last["pipeline"]["closed_form_idle_fraction"], 2 / (in_a_row + 2))

    def test_time_of_replicas(self):
        done = self.train(pipedream(), "engine.replicas=[2,1]", "engine.balance=[2,2]", ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        last = self.epochs()[-1]
        ranks = self.assert_time_is_accounted_for(last)
        self.assertEqual([(rank["stage"], rank["replica"]) for rank in ranks], [(0, 0), (0, 1), (1, 0)])
        self.assertEqual([rank["passes"][0]["forward"]["count"] for rank in ranks],
                         [last["steps"] // 2, last["steps"] // 2, last["steps"]])
        self.assertNotIn("closed_form_idle_fraction", last["pipeline"])

    def test_resume_continues_bit_for_bit(self):
        self.assert_resume_continues(pipedream(training__epochs=4), ranks=2)

    def test_lags_that_go_on_over_epochs(self):
        config = pipedream(training__epochs=4)
        config["engine"]["drain"] = "never"
        self.assert_resume_continues(config, ranks=3)
        self.assertEqual(self.run_json("whole")["engine_description"]["knobs"]["drain"], "never")
        self.assertTrue([text for text in self.run_json("whole")["engine_description"]["differences"] if "drain=never" in text])
        for stage, lag in zip(self.epochs("whole")[1]["staleness"], (2, 1, 0)):
            self.assertEqual(stage["updates_behind"], [0] * lag + [stage["updates"]], "late from the first mini-batch on")

    def test_verify_compares_with_the_recurrence(self):
        done = self.run_binary("verify", self.write(pipedream(training__dtype="fp64")), ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("VERIFY PASSED engine=pipedream reference=pipedream-recurrence ranks=3", done.stdout)
        self.assertIn("worst=0.00e+00", done.stdout)

    def test_the_planner_decides_replicas_and_balance(self):
        done = self.run_binary("profile", self.write(pipedream()), "--out", self.path("times.json"))
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("times.json")) as file:
            profile = json.load(file)
        # One layer takes long: more ranks for it, but not for the others, whose weights would be slow to sum.
        for name, layer in profile["layers"].items():
            layer["forward_ns"] = layer["backward_ns"] = 10 ** 8 if name == "ln_f" else 10 ** 6
        self.write(profile, "edited.json")
        knobs = ["engine.plan=replicated", "engine.profile=" + self.path("edited.json"), "engine.bandwidth=5e-4"]
        done = self.train(pipedream(), *knobs, ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        chosen = self.run_json()["engine_description"]["knobs"]
        self.assertEqual((chosen["plan"], chosen["replicas"], chosen["balance"]), ("replicated", "[1, 2]", "[2, 2]"))
        last = self.epochs()[-1]
        self.assertGreater(last["pipeline"]["planned_s"], last["steps"] * 0.1, "0.2 s for a mini-batch on one of two replicas")
        for plan in ("replicated", "upstream"):
            done = self.run_binary("plan", self.write(pipedream()), "--ranks", "3", *knobs[1:], f"engine.plan={plan}")
            self.assertEqual(done.returncode, 0, done.stderr)
            for expected in ("runner-up", "best straight pipeline", "one replicated stage", "all-reduce", "compute of stage"):
                self.assertIn(expected, done.stdout + done.stderr)

    def test_stages_in_the_plan_need_what_a_rank_is_told_to_need(self):
        config = pipedream(workload__width=512, workload__layers=3, workload__heads=8)
        done = self.run_binary("plan", self.write(config), "--ranks", "3", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(done.stdout)
        table = next(table for table in plan["tables"] if table["title"].startswith("memory of a rank of each stage"))
        first = dict(zip(table["columns"], table["rows"][0]))
        for kind in ("parameters", "weight_versions", "gradients", "optimizer", "activations"):
            self.assertAlmostEqual(float(first[kind]), plan["memory_predicted_bytes"][kind] / 2**20, delta=0.06, msg=kind)
        self.assertGreater(float(first["gradients"]), 1.0)

    def test_planner_mistakes(self):
        for change, message in ((["engine.plan=replicated"], "needs the file that `pdlbench profile` writes"),
                                (["engine.bandwidth=3"], "acts with plan=replicated and plan=upstream only"),
                                (["engine.plan=upstream", "engine.replicas=[3]"], "does not act with plan=upstream")):
            self.assert_fails(self.run_binary("plan", self.write(pipedream()), "--ranks", "3", *change), 2, message)

    def test_the_reference_is_no_choice(self):
        done = self.run_binary("plan", self.write(tiny(engine={"name": "pipedream-recurrence"})), "--ranks", "1")
        self.assertEqual(done.returncode, 2, done.stdout)

    def test_a_failing_stage_ends_all_ranks_with_one_message(self):
        self.assert_divergence_ends_all(pipedream(workload=harness.TINY_VGG), ranks=3)

    def test_what_is_left_out_is_said(self):
        done = self.run_binary("run", self.write(pipedream()), "engine.replicas=[3]", "--out", self.path("out"), ranks=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        last = self.epochs()[-1]
        if last["steps"] % 3:
            self.fail("whole rounds only")
        self.assertIn("are left out, as 3 make whole updates", done.stderr)
        self.assertNotIn("pipeline", last, "one stage is none")


if __name__ == "__main__":
    harness.main()
