#!/usr/bin/env python3
"""scripts/bench/step_budget.py on the committed table of single operations. Needs no binary and no GPU."""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUDGET = ROOT / "scripts" / "bench" / "step_budget.py"
TABLE = ROOT / "results" / "reference" / "h200" / "ops.json"


def budget(*arguments):
    return subprocess.run([sys.executable, "-B", str(BUDGET), *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=60, check=False)


class StepBudget(unittest.TestCase):
    def test_parts_add_up_and_what_is_left_is_named(self):
        result = budget(TABLE, "--step-ms", "gpt2=1000")
        self.assertEqual(result.returncode, 0, result.stderr)
        gpt2 = result.stdout.split("\n\n")[1]
        parts = [line.split() for line in gpt2.splitlines() if re.match(r"(gemm|attention|pass|update)\.", line)]
        self.assertGreater(len(parts), 20)
        total = float(re.search(r"^sum +([0-9.]+)", gpt2, re.M).group(1))
        self.assertAlmostEqual(sum(float(part[3]) for part in parts), total, delta=0.2)
        for name, times, us, ms, floor, ratio, gap in parts:
            self.assertAlmostEqual(float(times) * float(us) / 1e3, float(ms), delta=0.02, msg=name)
            self.assertAlmostEqual(float(ms) - float(floor), float(gap), delta=0.02, msg=name)
        left = float(re.search(r"([-0-9.]+) not in the table", gpt2).group(1))
        self.assertAlmostEqual(left, 1000.0 - total, delta=0.02)

    def test_a_table_that_lacks_operations_is_refused_by_name(self):
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        table["rows"] = [row for row in table["rows"] if row["name"] != "update.adamw"]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "ops.json"
            path.write_text(json.dumps(table), encoding="utf-8")
            result = budget(path)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("update.adamw", result.stderr)

    def test_step_times_of_no_model_are_refused(self):
        self.assertIn("gpt3", budget(TABLE, "--step-ms", "gpt3=1").stderr)
        self.assertIn("no number", budget(TABLE, "--step-ms", "gpt2=no number").stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary")
    parser.add_argument("--launcher")
    args, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)
