#!/usr/bin/env python3
"""scripts/bench/compare_ops.py on tables made up here. Needs no binary and no GPU."""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

COMPARE = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "bench" / "compare_ops.py"


def table(times, **setting):
    return {"gpu": "NVIDIA H200", "libraries": "CUDA 13.0", "state_after": {"sm_clock_mhz": 1980.0, "throttle": "none"}, **setting,
            "rows": [{"name": name, "us": us} for name, us in times.items()]}


class CompareOps(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="pdlbench ops ")
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)

    def compare(self, old, new, *options):
        paths = []
        for name, content in (("old.json", old), ("new.json", new)):
            paths.append(self.directory / name)
            if content is not None:
                paths[-1].write_text(content if isinstance(content, str) else json.dumps(content))
        return subprocess.run([sys.executable, "-B", str(COMPARE), *map(str, paths), *options], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=60, check=False)

    def test_what_is_within_the_tolerance_passes(self):
        result = self.compare(table({"gemm.qkv": 100.0, "update.adamw": 2500.0}), table({"gemm.qkv": 104.9, "update.adamw": 2390.0}))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout, "2 operations, 0 slower or missing at a tolerance of 0.05\n")

    def test_a_slower_operation_fails_by_name_and_ratio(self):
        old, new = table({"gemm.qkv": 100.0, "gemm.fc1": 50.0}), table({"gemm.qkv": 106.0, "gemm.fc1": 40.0})
        result = self.compare(old, new)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertRegex(result.stdout, r"gemm\.qkv +100\.0 +106\.0 +1\.060  slower")
        self.assertRegex(result.stdout, r"gemm\.fc1 +50\.0 +40\.0 +0\.800  faster")
        self.assertEqual(self.compare(old, new, "--tolerance", "0.07").returncode, 0)
        self.assertEqual(self.compare(old, new, "--only", "gemm.fc1").returncode, 0)

    def test_a_missing_operation_fails_and_a_new_one_is_told(self):
        result = self.compare(table({"pass.a": 1.0, "pass.b": 1.0}), table({"pass.a": 1.0, "pass.c": 1.0}))
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertRegex(result.stdout, r"pass\.b +1\.0 +missing")
        self.assertIn("only in the new table: pass.c", result.stdout)

    def test_tables_of_unlike_machines_are_told(self):
        result = self.compare(table({"a": 1.0}), table({"a": 1.0}, gpu="NVIDIA A100", state_after={"sm_clock_mhz": 1410.0}))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("not alike: gpu: NVIDIA H200 and NVIDIA A100", result.stdout)
        self.assertIn("not alike: sm_clock_mhz at the end: 1980.0 and 1410.0", result.stdout)

    def test_what_cannot_be_compared_is_refused(self):
        good = table({"a": 1.0})
        for old, new in ((None, good), (good, "{"), (good, "[]"), (good, {"rows": [{"name": "a"}]}), (table({"a": 0.0}), good),
                         (good, {"rows": [{"name": "a", "us": "nan"}]})):
            result = self.compare(old, new)
            self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
            self.assertTrue(result.stderr.startswith("error: "), result.stderr)
            (self.directory / "old.json").unlink(missing_ok=True)
        self.assertEqual(self.compare(good, good, "--only", "b").returncode, 2)
        self.assertEqual(self.compare(good, good, "--tolerance", "-1").returncode, 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary")
    parser.add_argument("--launcher")
    args, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)
