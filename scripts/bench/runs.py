"""What the benchmark scripts share: starting programs, reading what pdlbench recorded, asking a GPU how it is doing."""
import json
import os
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WITH_TORCH = "name an interpreter that has PyTorch with CUDA and torchvision with --python, or give --skip-peers"


class Failed(Exception):
    pass


def start(command, way_out, **options):
    """Runs a program to its end, its output as text."""
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"still running after {error.timeout:.0f} s: {' '.join(command)}") from error
    except OSError as error:
        raise Failed(f"cannot start {command[0]}: {error.strerror}; {way_out}") from error


def why(command, done):
    return f"code {done.returncode} from {' '.join(command)}\n{done.stderr[-2000:]}"


def read_record(folder):
    """The run and its last epoch."""
    with open(os.path.join(folder, "run.json")) as file:
        run = json.load(file)
    with open(os.path.join(folder, "epochs.jsonl")) as file:
        return run, json.loads(file.readlines()[-1])


def write_json(path, content):
    """Whole or not at all: what was measured before stays when the disk is full."""
    with open(path + ".part", "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    os.replace(path + ".part", path)


def gpu_facts():
    """Of the first GPU. Asks only; nothing is set."""
    fields = "name,driver_version,power.draw,power.limit,clocks.sm,clocks.max.sm,temperature.gpu"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    try:
        done = subprocess.run(["nvidia-smi", "-i", first, f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True)
        return dict(zip(fields.split(","), [value.strip() for value in done.stdout.splitlines()[0].split(",")]))
    except (OSError, IndexError):
        return {}
