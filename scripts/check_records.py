#!/usr/bin/env python3
"""Check the records of runs: types and fields against results/schema/, then order, counts and times.

    scripts/check_records.py DIR...

DIR holds run.json, or directories below it do. Exit code 0: all sound; 3: no records there; 8: a check failed.
A run that did not succeed can be sound; the status is printed. Needs nothing but Python.
"""

import argparse
import functools
import json
import math
import pathlib
import re
import sys

SCHEMA_DIR = pathlib.Path(__file__).resolve().parent.parent / "results" / "schema"
NO_RECORDS, CHECK_FAILED = 3, 8
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool}


@functools.lru_cache(maxsize=None)
def load_schema(name):
    return json.loads((SCHEMA_DIR / f"{name}.schema.json").read_text(encoding="utf-8"))


def is_type(value, name):
    """JSON's types: true is no number, 3.0 is no integer here, because the writer never spells one so."""
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def schema_errors(value, schema, root, path="", ref=None):
    """Yields what in `value` breaks `schema`: the part of JSON Schema draft-07 that the two files use."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        yield from schema_errors(value, root["definitions"][name], root, path, name)
        return
    place = path or "the whole"
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r} instead of {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    for part in schema.get("allOf", []):
        yield from schema_errors(value, part, root, path)
    if "oneOf" in schema:
        fitting = [part for part in schema["oneOf"] if not list(schema_errors(value, part, root, path))]
        if len(fitting) != 1:
            yield f"{place}: {value!r} is no {ref or 'legal value'}"
    if "type" in schema and not is_type(value, schema["type"]):
        yield f"{place}: {json.dumps(value)[:40]} is no {schema['type']}"
        return
    if "minimum" in schema and is_type(value, "number") and value < schema["minimum"]:
        yield f"{place}: {value} is below {schema['minimum']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from object_errors(value, schema, root, path)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from schema_errors(item, schema["items"], root, f"{path}[{index}]")


def object_errors(value, schema, root, path):
    prefix = path + "." if path else ""
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for key in schema.get("required", []):
        if key not in value:
            yield f"{prefix}{key} is missing"
    for key, item in value.items():
        if key in known:
            yield from schema_errors(item, known[key], root, prefix + key)
        elif isinstance(others, dict):
            yield from schema_errors(item, others, root, prefix + key)
        elif others is False:
            yield f"{prefix}{key} is not in the schema"


def refuse_constant(word):
    raise ValueError(f"{word} is not JSON; it is written as a string")


def refuse_duplicates(pairs):
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} stands there twice")
    return dict(pairs)


def parse(text):
    """Strict JSON: no bare NaN, no key twice."""
    return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)


def find_runs(directory):
    """The directory itself when it holds run.json, else all below it that do, sorted."""
    directory = pathlib.Path(directory)
    if (directory / "run.json").is_file():
        return [directory]
    return sorted(path.parent for path in directory.rglob("run.json"))


def read_epochs(path, problems):
    """The epochs up to the first line that cannot be read."""
    if not path.is_file():
        problems.append("epochs.jsonl is missing")
        return []
    pieces = path.read_bytes().split(b"\n")
    partial = pieces.pop()
    if partial:
        problems.append(f"epochs.jsonl: a last line of {len(partial)} bytes is not finished; it is dropped")
    epochs = []
    for number, line in enumerate(pieces, 1):
        try:
            epoch = parse(line.decode("utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            problems.append(f"epochs.jsonl line {number}: {error}")
            return epochs
        found = list(schema_errors(epoch, load_schema("epoch"), load_schema("epoch")))
        problems.extend(f"epochs.jsonl line {number}: {text}" for text in found)
        if found:
            return epochs
        epochs.append(epoch)
    return epochs


def spread_errors(value, path):
    """min <= mean <= max wherever there are such three; the mean may be rounded."""
    if not isinstance(value, dict):
        return
    if set(value) == {"min", "mean", "max"}:
        low, mean, high = (float(value[key]) for key in ("min", "mean", "max"))
        slack = 1.0 + 1e-9 * abs(high) if path.split(".")[0].endswith("_bytes") else 1e-9 * abs(high)
        if not any(map(math.isnan, (low, mean, high))) and not low - slack <= mean <= high + slack:
            yield f"{path}: mean {mean} is not between {low} and {high}"
        return
    for key, item in value.items():
        yield from spread_errors(item, f"{path}.{key}" if path else key)


def pipeline_errors(pipeline):
    """Where ranks of a pipeline spent their time: all of it, and nothing twice."""
    for rank in pipeline["ranks"]:
        parts = [rank[key] for key in ("forward_s", "backward_s", "recompute_s", "optimizer_s", "other_s")]
        parts += [*rank["wait_s"].values(), *rank["comm_s"].values()]
        spent, train_s = sum(map(float, parts)), float(rank["train_s"])
        if abs(spent - train_s) > 1e-6 * train_s:
            yield f"rank {rank['rank']} of the pipeline spent {spent} of {train_s} s"


def epoch_errors(epochs):
    """Order and times over the lines."""
    elapsed_s = 0.0
    for index, epoch in enumerate(epochs):
        if epoch["epoch"] != index:
            yield f"line {index + 1} of epochs.jsonl is epoch {epoch['epoch']} instead of {index}"
        if not float(epoch["elapsed_s"]) >= elapsed_s:
            yield f"elapsed_s runs backwards at epoch {epoch['epoch']}"
        elapsed_s = float(epoch["elapsed_s"])
        step = [float(epoch["step_ms"][key]) for key in ("min", "p5", "median", "p95", "p99", "max")]
        if step != sorted(step):
            yield f"step_ms of epoch {epoch['epoch']}: the percentiles are not in order"
        if epoch.get("skipped_steps", 0) > epoch["steps"]:
            yield f"epoch {epoch['epoch']} skipped {epoch['skipped_steps']} of {epoch['steps']} steps"
        for text in [*spread_errors(epoch, ""), *pipeline_errors(epoch.get("pipeline", {"ranks": []}))]:
            yield f"epoch {epoch['epoch']}: {text}"


def run_errors(run, epochs):
    """What run.json says against what is there."""
    if run["world"]["ranks"] != len(run["ranks"]):
        yield f"world.ranks is {run['world']['ranks']}, but {len(run['ranks'])} ranks are listed"
    if [rank["rank"] for rank in run["ranks"]] != list(range(len(run["ranks"]))):
        yield "ranks are not listed in order"
    if run["status"] != "running" and run["epochs_recorded"] != len(epochs):
        yield f"run.json counts {run['epochs_recorded']} epochs, epochs.jsonl has {len(epochs)}"
    if run["status"] == "success":
        if len(epochs) != run["epochs_planned"]:
            yield f"a success with {len(epochs)} of {run['epochs_planned']} epochs"
        if not run["end_utc"]:
            yield "a success without an end"
        if run["reason"]:
            yield "a success with a reason to end otherwise"
    elif run["status"] != "running" and not run["reason"]:
        yield f"status {run['status']} without a reason"


def read_run(directory):
    """(run, epochs, problems); run is None when run.json cannot be used."""
    directory = pathlib.Path(directory)
    problems = []
    try:
        run = parse((directory / "run.json").read_bytes().decode("utf-8"))
    except (OSError, ValueError, UnicodeDecodeError) as error:
        return None, [], [f"run.json: {error}"]
    found = list(schema_errors(run, load_schema("run"), load_schema("run")))
    if found:
        return None, [], [f"run.json: {text}" for text in found]
    epochs = read_epochs(directory / "epochs.jsonl", problems)
    problems.extend(epoch_errors(epochs))
    problems.extend(run_errors(run, epochs))
    return run, epochs, problems


def printable(text):
    """Paths may hold bytes that no encoding knows, and the terminal may know ASCII only."""
    encoding = sys.stdout.encoding or "ascii"
    return str(text).encode(encoding, "backslashreplace").decode(encoding)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", metavar="DIR")
    failed = False
    for root in parser.parse_args(arguments).directories:
        runs = find_runs(root)
        if not runs:
            print(printable(f"{root}: no run.json here or below"), file=sys.stderr)
            return NO_RECORDS
        for directory in runs:
            run, epochs, problems = read_run(directory)
            verdict = "FAILED" if problems else "ok"
            status = f" (status {run['status']}, {len(epochs)} epochs)" if run else ""
            print(printable(f"{directory}: {verdict}{status}"))
            for problem in problems:
                print(printable(f"  {problem}"))
            failed = failed or bool(problems)
    return CHECK_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
