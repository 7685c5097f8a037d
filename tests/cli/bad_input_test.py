"""Mistakes a user makes: each has one clear message and its own exit code, and leaves no result behind."""
import gzip
import json
import os
import struct
import subprocess

import _harness as harness
from _harness import Case, tiny


def idx_images(path, count, size=28, magic=0x803, bytes_short=0):
    data = struct.pack(">IIII", magic, count, size, size) + bytes(range(256)) * (count * size * size // 256 + 1)
    with open(path, "wb") as file:
        file.write(data[:16 + count * size * size - bytes_short])


def idx_labels(path, labels):
    with gzip.open(path, "wb") as file:
        file.write(struct.pack(">II", 0x801, len(labels)) + bytes(labels))


class Config(Case):
    def reject(self, config, *phrases, code=2, ranks=0):
        done = self.train(config, ranks=ranks)
        self.assert_fails(done, code, *phrases)
        self.assertFalse(os.path.exists(self.path("out/epochs.jsonl")), "left a record behind")
        return done

    def test_unknown_key_names_its_neighbour(self):
        done = self.reject(tiny(training__epoch=3), "/training/epoch", 'unknown key', 'did you mean "epochs"?')
        self.assertIn("line", done.stderr)

    def test_unknown_engine_knob(self):
        self.reject(tiny(engine__bucket_cap_mib=3), "/engine/bucket_cap_mib", 'did you mean "bucket_cap_mb"?')

    def test_duplicate_key(self):
        text = json.dumps(tiny()).replace('"epochs": 2', '"epochs": 2, "epochs": 3')
        self.reject(text, "/training/epochs", "duplicate key")

    def test_fraction_for_an_integer(self):
        self.reject(tiny(training__epochs=3.7), "/training/epochs", "3.7")

    def test_negative_size(self):
        self.reject(tiny(training__global_batch_size=-1), "/training/global_batch_size", "-1")

    def test_all_problems_at_once(self):
        done = self.reject(tiny(training__epoch=3, training__seed="x", device="gpu"), "/training/epoch", "/training/seed", "/device")
        self.assertEqual(done.stdout.splitlines()[-1], "RESULT INVALID reason=usage code=2")

    def test_syntax_error_has_a_line(self):
        self.reject('{\n  "name": "x",\n  oops\n}', "line 3")

    def test_missing_file(self):
        self.assert_fails(self.run_binary("run", self.path("none.json"), "--out", self.path("out")), 2, "none.json")

    def test_override_of_unknown_key(self):
        self.assert_fails(self.train(tiny(), "training.epohcs=3"), 2, "epohcs", 'did you mean "epochs"?')

    def test_batch_that_does_not_divide(self):
        self.reject(tiny(training__global_batch_size=10), "10 samples do not divide by 4", "8 or 12", ranks=4)

    def test_micro_batch_that_does_not_divide(self):
        self.reject(tiny(training__micro_batch_size=5), "micro_batch_size", "5 does not divide")

    def test_more_ranks_than_samples(self):
        self.reject(tiny(workload__train_samples=3, training__global_batch_size=4), "more ranks than samples", code=4, ranks=4)

    def test_serial_on_two_ranks(self):
        self.reject(tiny(engine={"name": "serial"}), "one rank, not on 2", ranks=2)

    def test_unknown_model_and_data(self):
        self.reject(tiny(workload__model="gpt2-tinny"), "gpt2-tinny", "gpt2-tiny")
        self.reject(tiny(workload__data="syntetic"), "syntetic", "synthetic")

    def test_cuda_without_a_gpu(self):
        cuda = json.loads(self.run_binary("info", "--json").stdout)["cuda"]
        if cuda == "not in this build":
            self.reject(tiny(device="cuda"), "CUDA", code=4)
        elif "no GPU is visible" in cuda:
            self.reject(tiny(device="cuda"), "no GPU is visible", code=4)
            for dtype in ("bf16", "fp16"):
                self.reject(tiny(training__dtype=dtype), "no GPU is visible", code=4)

    def test_types_of_the_other_kind_of_device(self):
        for dtype in ("bf16", "tf32", "fp16"):
            self.reject(tiny(training__dtype=dtype, device="cpu"), "/training/dtype", f"{dtype} needs a GPU")
        self.reject(tiny(training__dtype="fp64", device="cuda"), "/training/dtype", "set device=cpu")

    def test_loss_scale_mistakes(self):
        where = "/training/loss_scale"
        self.reject(tiny(training__loss_scale={"name": "static"}), where + "/scale")
        self.reject(tiny(training__loss_scale={"name": "dynamic", "scale": 8}), where + "/scale", "name=static only")
        self.reject(tiny(training__loss_scale={"name": "dynamical"}), where + "/name", 'did you mean "dynamic"?')
        self.reject(tiny(training__loss_scale={"name": "dynamic", "init_scal": 8}), where, 'did you mean "init_scale"?')
        self.reject(tiny(training__loss_scale={"name": "static", "scale": 1e300}), where + "/scale", "8.50706e+37")
        self.reject(tiny(training__loss_scale=1024), where, "expected an object", "got 1024")

    def test_nccl_limits(self):
        self.reject(tiny(nccl={"min_ctas": 9, "max_ctas": 8}), "/nccl/min_ctas", "9 is more than max_ctas, 8")
        self.reject(tiny(nccl={"max_ctas": 65}), "/nccl/max_ctas", "65", "64")
        self.reject(tiny(nccl={"max_cta": 8}), "/nccl/max_cta", 'did you mean "max_ctas"?')

    def test_message_is_printed_once(self):
        done = self.reject(tiny(training__epoch=3), "/training/epoch", ranks=3)
        self.assertEqual((done.stdout + done.stderr).count("/training/epoch"), 1)


class CommandLine(Case):
    def test_mistyped_command(self):
        self.assert_fails(self.run_binary("rum", "x.json"), 2, 'did you mean "run"?')

    def test_no_command(self):
        self.assert_fails(self.run_binary(), 2)

    def test_unknown_option(self):
        self.assert_fails(self.run_binary("run", self.write(tiny()), "--fource"), 2, "--fource")

    def test_help_and_version(self):
        done = self.run_binary("--help")
        self.assertEqual(done.returncode, 0)
        for command in ("run", "verify", "plan", "list", "info", "report", "data"):
            self.assertIn(command, done.stdout)
        self.assertEqual(self.run_binary("run", "--help").returncode, 0)
        self.assertIn("pdlbench", self.run_binary("--version").stdout)

    def test_lone_rank_under_a_launcher_that_says_four(self):
        env = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}
        done = self.train(tiny(), env=env)
        self.assert_fails(done, 4, "4", "1", "--mpi=")
        self.assertFalse(os.path.exists(self.path("out")))


class Data(Case):
    def images(self, **changes):
        config = tiny(workload={"model": "vgg11", "width_multiplier": 0.0625, "image_size": 32, "classifier_width": 16, "data": "idx",
                                "path": self.path("images"), "labels_path": self.path("labels.gz"), "classes": 10}, **changes)
        return config

    def test_missing_file(self):
        self.assert_fails(self.train(self.images()), 3, self.path("images"))

    def test_truncated_file(self):
        idx_images(self.path("images"), 100, bytes_short=10)
        idx_labels(self.path("labels.gz"), [i % 10 for i in range(100)])
        self.assert_fails(self.train(self.images()), 3, self.path("images"), "expected 78400", "got 78390")

    def test_wrong_magic(self):
        idx_images(self.path("images"), 100, magic=0x802)
        idx_labels(self.path("labels.gz"), [i % 10 for i in range(100)])
        self.assert_fails(self.train(self.images()), 3, self.path("images"))

    def test_label_out_of_range(self):
        idx_images(self.path("images"), 100)
        idx_labels(self.path("labels.gz"), [i % 10 for i in range(99)] + [10])
        self.assert_fails(self.train(self.images()), 3, self.path("labels.gz"), "10")

    def test_whole_files_train(self):
        idx_images(self.path("images"), 100)
        idx_labels(self.path("labels.gz"), [i % 10 for i in range(100)])
        done = self.train(self.images())
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_inspect(self):
        idx_images(self.path("images"), 100)
        done = self.run_binary("data", "inspect", self.path("images"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("100", done.stdout)
        idx_images(self.path("images"), 100, bytes_short=1)
        self.assert_fails(self.run_binary("data", "inspect", self.path("images")), 3, self.path("images"))

    def test_prepared_text_trains(self):
        with open(self.path("text.txt"), "w") as file:
            file.write("\n".join(f"line {i} of a text that repeats itself {i % 7} times" for i in range(400)))
        done = self.run_binary("data", "prepare", self.path("text.txt"), "--out", self.path("tokens.bin"), "--tokenizer", "bytes")
        self.assertEqual(done.returncode, 0, done.stderr)
        config = tiny(workload={"model": "gpt2-tiny", "layers": 1, "width": 32, "heads": 2, "sequence_length": 32, "data": "tokens",
                                "path": self.path("tokens.bin"), "vocabulary_size": 256})
        done = self.train(config)
        self.assertEqual(done.returncode, 0, done.stderr)


class Output(Case):
    def test_existing_directory_is_refused(self):
        self.assertEqual(self.train(tiny(training__epochs=1)).returncode, 0)
        before = self.epochs()
        self.assert_fails(self.train(tiny(training__epochs=1), ranks=2), 2, self.path("out"), "--force", "--resume")
        self.assertEqual(self.epochs(), before)
        self.assertEqual(self.train(tiny(training__epochs=1), "--force").returncode, 0)

    def test_unwritable_place(self):
        open(self.path("file"), "w").close()
        self.assert_fails(self.train(tiny(), out="file/out"), 1, self.path("file"))

    def test_full_disk_keeps_earlier_epochs(self):
        os.mkdir(self.path("small"))
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", self.path("small")], capture_output=True)
        if mounted.returncode != 0:
            self.skipTest("cannot mount a small file system here")
        try:
            config = tiny(training__epochs=400, training__checkpoint_every_epochs=0, workload__train_samples=12)
            done = self.train(config, out="small/out", ranks=2)
            self.assert_fails(done, 1, self.path("small/out"), "No space left")
            self.assertGreater(len(self.epochs("small/out")), 2)
        finally:
            subprocess.run(["umount", self.path("small")], check=False)


if __name__ == "__main__":
    harness.main()
