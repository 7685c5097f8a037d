"""What a run leaves behind, and that the same training gives the same numbers on any number of ranks."""
import glob
import json
import os
import subprocess
import sys

import _harness as harness
from _harness import Case, tiny

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Run(Case):
    def test_records_and_result_line(self):
        done = self.train(tiny(), ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout.splitlines()[-1], r"^RESULT VALID engine=ddp ranks=2 .*epoch_s=[0-9.e-]+ .*val_loss=[0-9.]+")
        run = self.run_json()
        self.assertEqual(run["status"], "success")
        self.assertEqual(run["config"]["training"]["seed"], 1234, "defaults belong to the effective configuration")
        self.assertTrue(run["flops_formula"])
        self.assertEqual("mfu" in self.epochs()[0], "peak_flops_per_s" in run, "a share of the peak needs the peak")
        self.assertEqual(len(self.epochs()), 2)
        checked = subprocess.run([sys.executable, os.path.join(ROOT, "scripts/check_records.py"), self.path("out")],
                                 capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_measured_memory_is_the_predicted(self):
        self.train(tiny(), ranks=2)
        last = self.epochs()[-1]
        for kind, predicted in last["memory_predicted_bytes"].items():
            measured = last["memory_peak_bytes"][kind]["max"]
            self.assertLessEqual(abs(measured - predicted), 0.01 * measured, kind)

    def test_knobs_and_deviations_from_upstream_are_recorded(self):
        for engine, knob, value, deviation in (("zero", "stage", 2, "works with every optimizer"),
                                               ("lbann", "sharded", True, "all weights are sharded")):
            done = self.train(tiny(training__epochs=1, engine={"name": engine, knob: value}), "--force", ranks=2)
            self.assertEqual(done.returncode, 0, done.stderr)
            told = self.run_json()["engine_description"]
            self.assertEqual(told["knobs"][knob], str(value).lower())
            self.assertIn(deviation, " ".join(told["differences"]))

    def test_a_data_store_is_recorded_and_changes_no_number(self):
        self.assertEqual(self.train(tiny(), ranks=2).returncode, 0)
        plain = self.epochs()
        self.assertEqual(self.run_json()["data"]["data_store"], "off")
        self.assertNotIn("data_store_bytes", plain[0])
        for preload, words in ((True, "preloaded"), (False, "filled when first used")):
            config = tiny(loader__data_store={"enabled": True, "preload": preload})
            done = self.train(config, "--force", ranks=2)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.run_json()["data"]["data_store"], words)
            for with_store, without in zip(self.epochs(), plain):
                self.assertEqual(with_store["train_loss"], without["train_loss"])
                self.assertEqual(with_store["val_loss"], without["val_loss"])
            sample_bytes = 2 * 16 * 4  # tokens and targets
            held = self.epochs()[-1]["data_store_bytes"]
            self.assertGreater(held["min"], (96 + 24) // 2 * sample_bytes)  # half of both splits, and what is on its way
            self.assertLess(held["max"], 2 * (96 + 24) // 2 * sample_bytes)
            self.assertGreater(self.epochs()[-1]["comm"]["data_store.send"]["bytes"], 0)
            checked = subprocess.run([sys.executable, os.path.join(ROOT, "scripts/check_records.py"), self.path("out")],
                                     capture_output=True, text=True)
            self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)
        planned = self.run_binary("plan", self.path("config.json"), "--ranks", "4", "--json")
        self.assertEqual(json.loads(planned.stdout)["data_store"],
                         {"sample_bytes": sample_bytes, "received_bytes_per_step": 3 * sample_bytes * 3 // 4})

    def test_same_curve_on_one_two_and_four_ranks(self):
        vgg = {"model": "vgg11", "width_multiplier": 0.0625, "image_size": 32, "classifier_width": 16, "dropout": 0.2,
               "data": "synthetic-learnable", "classes": 4, "train_samples": 96, "validation_samples": 24}
        sgd = {"name": "sgd", "lr": 0.02, "momentum": 0.9}
        # VGG has branches (ReLU, max): a value within rounding of one takes another way on another number of ranks, and
        # then fp32 keeps fewer digits. In fp64 none is that near.
        for config, tolerance in ((tiny(), 1e-6),
                                  (tiny(training__dtype="fp64"), 1e-12),
                                  (tiny(workload=vgg, training__optimizer=sgd), 1e-3),
                                  (tiny(workload=vgg, training__optimizer=sgd, training__dtype="fp64"), 1e-12)):
            curves = []
            for ranks in (1, 2, 4):
                done = self.train(config, ranks=ranks, out=f"r{ranks}")
                self.assertEqual(done.returncode, 0, done.stderr)
                curves.append([epoch["val_loss"] for epoch in self.epochs(f"r{ranks}")])
                subprocess.run(["rm", "-rf", self.path(f"r{ranks}")], check=True)
            for curve in curves[1:]:
                for a, b in zip(curve, curves[0]):
                    self.assertLess(abs(a - b) / b, tolerance)

    def test_resume_continues_bit_for_bit(self):
        # A factor of 3 is in the last bits of every gradient, so the loss scale has to be resumed too.
        config = tiny(training__epochs=4, training__loss_scale={"name": "dynamic", "growth_factor": 3, "growth_interval": 3})
        self.assert_resume_continues(config, 2)

    def test_divided_state_resumes_bit_for_bit(self):
        for stage in (1, 3):
            with self.subTest(stage=stage):
                engine = {"name": "zero", "stage": stage, "reduce_bucket_size": 3000}
                self.assert_resume_continues(tiny(training__epochs=4, engine=engine), 2)
                self.assertTrue(os.path.exists(self.path("broken/checkpoint/rank-00001.bin")), "each rank has its own")

    def test_resume_refuses_another_run(self):
        self.assertEqual(self.train(tiny(training__epochs=2), ranks=2).returncode, 0)
        done = self.train(tiny(training__epochs=2), "training.seed=9", "--resume", ranks=2)
        self.assert_fails(done, 2, "configuration hash")
        done = self.train(tiny(training__epochs=2), "--resume", ranks=3)
        self.assert_fails(done, 2, "number of ranks")
        self.assert_fails(self.train(tiny(), "--resume", out="nowhere"), 2, "nowhere")

    def test_skipped_steps_are_recorded(self):
        config = tiny(training__dtype="fp64", training__loss_scale={"name": "dynamic", "init_scale": 1e300, "backoff_factor": 1e-100,
                                                                    "growth_interval": 5})
        done = self.train(config, ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 of 8 steps skipped, loss scale ", done.stderr)  # 1e300 and 1e200 overflow, 1e100 does not
        first, second = self.epochs()
        self.assertEqual((first["skipped_steps"], second["skipped_steps"]), (2, 0))
        self.assertAlmostEqual(first["loss_scale"] / 2e100, 1)  # grown after five of the six good steps
        self.assertAlmostEqual(second["loss_scale"] / 4e100, 1)
        checked = subprocess.run([sys.executable, os.path.join(ROOT, "scripts/check_records.py"), self.path("out")],
                                 capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)
        verified = self.run_binary("verify", self.path("config.json"), ranks=2)
        self.assertEqual(verified.returncode, 0, verified.stderr)

    def test_steps_csv_on_request(self):
        self.assertEqual(self.train(tiny(measure__raw_steps=True, training__epochs=1)).returncode, 0)
        with open(self.path("out/steps.csv")) as file:
            self.assertEqual(len(file.readlines()), 1 + 8)

    def test_json_output_is_only_json(self):
        for arguments in (["list", "--json"], ["info", "--json"], ["plan", self.write(tiny()), "--ranks", "4", "--json"]):
            json.loads(self.run_binary(*arguments).stdout)

    def test_every_common_setting_is_listed_and_recorded(self):
        settings = json.loads(self.run_binary("list", "settings", "--json").stdout)["settings"]
        keys = {setting["key"] for setting in settings}
        for key in ("training.dtype", "training.optimizer.lr", "limits.timeout_s", "comm", "nccl.max_ctas", "nccl.gemm_sm_margin"):
            self.assertIn(key, keys)
        self.assertEqual(self.train(tiny(training__epochs=1, nccl={"max_ctas": 8})).returncode, 0)
        self.assertEqual(self.run_json()["config"]["nccl"], {"min_ctas": 0, "max_ctas": 8, "gemm_sm_margin": 0})

    def test_report(self):
        self.assertEqual(self.train(tiny(training__epochs=1), out="a").returncode, 0)
        self.assertEqual(self.train(tiny(training__epochs=1), ranks=2, out="b").returncode, 0)
        table = self.run_binary("report", self.path("a"), self.path("b"))
        self.assertEqual(table.returncode, 0, table.stderr)
        self.assertIn("ddp", table.stdout)
        rows = json.loads(self.run_binary("report", self.path("a"), self.path("b"), "--format", "json").stdout)
        self.assertEqual(len(rows), 2)

    def test_output_that_is_closed_early_harms_nothing(self):
        process = self.start("run", self.write(tiny()), "--out", self.path("out"), ranks=2)
        process.stdout.close()
        self.assertIn(process.wait(timeout=60), (0, 141, -13))
        self.epochs()


class Verify(Case):
    def test_passes_and_fails(self):
        config = self.write(tiny(training__dtype="fp64"))
        done = self.run_binary("verify", config, ranks=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.splitlines()[-1].startswith("VERIFY PASSED engine=ddp reference=serial ranks=2 steps=5"))
        done = self.run_binary("verify", config, "--tolerance", "1e-30", ranks=3)
        self.assert_fails(done, 8, "VERIFY FAILED", "first to differ:")


class Plan(Case):
    def plan(self, config, *arguments):
        done = self.run_binary("plan", os.path.join(ROOT, "configs", config), *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_every_committed_configuration(self):
        for folder in ("quick", "study", "bench"):
            for path in sorted(glob.glob(os.path.join(ROOT, "configs", folder, "*.json"))):
                with self.subTest(path=path):
                    alone = folder == "bench" or "serial" in path  # the serial engine takes one rank
                    done = self.run_binary("plan", path, "--ranks", "1" if alone else "4", "--json")
                    self.assertEqual(done.returncode, 0, done.stderr)

    def test_vgg16_buckets(self):
        plan = self.plan("study/ddp_vgg16.json", "--ranks", "4")
        self.assertEqual(plan["parameters"], 138357544)
        self.assertEqual([row[2] for row in plan["tables"][0]["rows"]], ["15.6", "64.0", "392.0", "27.0", "27.0", "2.1"])
        self.assertEqual(plan["comm_per_step"]["world.all_reduce"]["bytes"], 2 * 3 * 138357544 * 4 // 4)

    def test_gpt2_medium_buckets(self):
        plan = self.plan("study/ddp_gpt2_medium.json", "--ranks", "8")
        self.assertEqual(plan["parameters"], 354823168)
        rows = plan["tables"][0]["rows"]
        self.assertEqual(len(rows), 37)
        self.assertEqual(round(float(rows[-1][2])), 216)
        self.assertTrue(any("last bucket" in warning for warning in plan["warnings"]))

    def test_divided_memory(self):
        """Formulas of the ZeRO paper for fp32 with Adam, plus what is the same for all: activations and workspace."""
        psi = 354823168 * 4
        for ranks in (1, 4, 64):
            plans = {stage: self.plan("study/zero_gpt2_medium.json", "--ranks", str(ranks), f"engine.stage={stage}")
                     for stage in (1, 2, 3)}
            for stage, plan in plans.items():
                memory = plan["memory_predicted_bytes"]
                expected = {"optimizer": 2 * psi / ranks, "gradients": psi if stage == 1 else psi / ranks}
                if stage < 3:
                    expected["parameters"] = psi
                for kind, bytes in expected.items():
                    self.assertLess(abs(memory[kind] - bytes), 0.01 * bytes, f"{kind} in stage {stage} on {ranks} ranks")
            if ranks > 1:
                totals = [plans[stage]["memory_predicted_bytes"]["total"] for stage in (1, 2, 3)]
                self.assertEqual(totals, sorted(totals, reverse=True))

    def test_memory_falls_as_published(self):
        """ZeRO's share of DDP's memory, GPT2-medium in bf16 with Adam, beside figure 9 of the study."""
        with open(os.path.join(ROOT, "results/published/gpt2_memory_by_ranks.json"), encoding="utf-8") as file:
            published = json.load(file)
        def total(config, ranks, *knobs):
            return self.plan(config, "--ranks", str(ranks), "training.dtype=bf16", *knobs)["memory_predicted_bytes"]["total"]
        adam = 'training.optimizer={"name": "adamw", "lr": 0.001, "weight_decay": 0.01}'
        shares = []
        for ranks, ddp, zero in zip(published["ranks"], published["gigabytes"]["ddp"], published["gigabytes"]["zero"]):
            share = total("study/zero_gpt2_medium.json", ranks, "engine.stage=2") / total("study/ddp_gpt2_medium.json", ranks, adam)
            shares.append(share)
            if ranks >= 8:
                self.assertLess(abs(share - zero / ddp), 0.03, f"{ranks} ranks")
        self.assertEqual(shares, sorted(shares, reverse=True))

    def test_tensor_parallel_memory_is_u_shaped_as_published(self):
        """Weights shrink with the ranks that divide them, activations grow with the batch: least on 2 ranks, as in figure 9."""
        with open(os.path.join(ROOT, "results/published/gpt2_memory_by_ranks.json"), encoding="utf-8") as file:
            published = json.load(file)
        curve = [(ranks, value) for ranks, value in zip(published["ranks"], published["gigabytes"]["megatron-intra"]) if value]
        adam = 'training.optimizer={"name": "adamw", "lr": 0.001, "weight_decay": 0.01}'
        for dtype in ("fp32", "bf16"):
            plans = [self.plan("study/megatron_intra_gpt2_medium.json", "--ranks", str(ranks), adam, f"training.dtype={dtype}",
                               f"training.batch_size_per_rank={32 * ranks}") for ranks, _ in curve]
            predicted = [plan["memory_predicted_bytes"]["total"] for plan in plans]
            for values in (predicted, [value for _, value in curve]):
                self.assertEqual(curve[values.index(min(values))][0], 2, f"{dtype}: {values}")
                self.assertEqual(values[1:], sorted(values[1:]))

    def test_the_plan_compares_the_stages_with_ddp(self):
        for config, columns in (("study/zero_vgg16.json", ["ddp", "stage 1", "stage 2", "stage 3"]),
                                ("study/lbann_vgg16.json", ["lbann", "lbann, sharded", "ddp", "ddp, gradient_as_bucket_view"])):
            plan = self.plan(config, "--ranks", "4")
            table = next(t for t in plan["tables"] if "beside other ways" in t["title"])
            self.assertEqual(table["columns"][1:], columns)
            totals = [float(cell) for cell in table["rows"][-1][1:]]
            self.assertGreater(max(totals), min(totals))
            self.assertEqual({row[0] for row in table["rows"]}, {*plan["memory_predicted_bytes"], "total"})

    def test_settings_that_defeat_themselves(self):
        def warnings(*knobs):
            return " ".join(self.plan("study/zero_gpt2_medium.json", "--ranks", "4", *knobs)["warnings"])
        self.assertIn("holds all", warnings("engine.reduce_bucket_size=5e8"))
        self.assertIn("keeps every gathered parameter", warnings("engine.stage=3", "engine.stage3_max_reuse_distance=1e9"))
        self.assertIn("gathered ahead", warnings("engine.stage=3", "engine.stage3_prefetch_bucket_size=0"))
        self.assertIn("than ddp", warnings("engine.preset=deepspeed", "engine.reduce_bucket_size=2e9"))
        self.assertIn("than stage 2", warnings("engine.preset=deepspeed", "engine.stage=3"))
        self.assertNotIn("needs", warnings("engine.stage=3"))

    def test_parameters_over_time(self):
        plan = self.plan("study/zero_vgg16.json", "--ranks", "4", "engine.stage=3")
        table = next(t for t in plan["tables"] if t["title"].startswith("parameters over one micro-batch"))
        self.assertEqual(len(table["rows"]), 32)
        self.assertEqual(max(float(row[5]) for row in table["rows"]), 456.0)  # the first two layers of the classifier
        shards = next(t for t in plan["tables"] if t["title"].startswith("shards"))
        self.assertEqual(len(shards["rows"]), 16)

    def test_divided_images_divide_activations(self):
        whole = self.plan("study/lbann_vgg16.json", "--ranks", "8", "training.micro_batch_size=16")
        for height, halo_elements in ((2, 129696 + (329728 - 28672) // 2), (4, None), (8, None)):
            plan = self.plan("study/lbann_vgg16.json", "--ranks", "8", "training.micro_batch_size=16",
                             f"engine.spatial.height={height}")
            self.assertEqual((plan["dp"], plan["tp"]), (8 // height, height))
            share = plan["memory_predicted_bytes"]["activations"] / whole["memory_predicted_bytes"]["activations"]
            self.assertLess(abs(share * height - 1), 0.1, "1/p, and the halos")
            if halo_elements:  # the published volume, half of it for one neighbour, without what serves nothing
                self.assertEqual(plan["comm_per_step"]["spatial.send"]["bytes"], 4 * 64 * halo_elements)

    def test_sharded_weights_of_lbann(self):
        psi, largest = 138357544 * 4, (25088 + 1) * 4096 * 4  # fp32; VGG-16's first classifier layer
        whole = self.plan("study/lbann_vgg16.json", "--ranks", "4")
        plan = self.plan("study/lbann_vgg16.json", "--ranks", "4", "engine.sharded=true")
        memory = plan["memory_predicted_bytes"]
        for kind, bytes in {"parameters": psi // 4 + largest, "optimizer": psi // 4, "gradients": psi}.items():
            self.assertLess(abs(memory[kind] - bytes), 0.01 * bytes, kind)
        sent = {operation: counts["bytes"] for operation, counts in plan["comm_per_step"].items()}
        self.assertEqual(sent["world.all_reduce"], whole["comm_per_step"]["world.all_reduce"]["bytes"])
        # 2f of gradients, 2f of weights for each micro-batch, and the padding of one bias
        passes = plan["comm_per_step"]["parameters.all_gather"]["calls"] // 64
        self.assertEqual(sent["parameters.all_gather"], passes * (sent["world.all_reduce"] + 2 * 24 * 4 * 3 // 4))
        titles = " ".join(table["title"] for table in plan["tables"])
        for words in ("all-reduces, in the order", "shards: blocks", "parameters over one micro-batch", "beside other ways"):
            self.assertIn(words, titles)
        def warnings(*knobs):
            return " ".join(self.plan("study/lbann_vgg16.json", "--ranks", "2", "engine.sharded=true", *knobs)["warnings"])
        self.assertIn("larger micro-batches send less", warnings("training.micro_batch_size=16"))
        self.assertIn("needs no less memory here than whole weights", warnings('training.optimizer={"name": "sgd", "lr": 0.01}'))
        self.assertNotIn("needs", warnings())

    def test_list_names_the_knobs_of_inner_blocks(self):
        engines = {engine["name"]: engine for engine in json.loads(self.run_binary("list", "engines", "--json").stdout)["engines"]}
        self.assertIn("spatial.height", [knob["key"] for knob in engines["lbann"]["knobs"]])

    def test_text_output(self):
        done = self.run_binary("plan", os.path.join(ROOT, "configs/study/ddp_vgg16.json"), "--ranks", "2")
        for phrase in ("all-reduce buckets", "memory of one rank", "sent by one rank"):
            self.assertIn(phrase, done.stdout)


if __name__ == "__main__":
    harness.main()
