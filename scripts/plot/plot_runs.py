#!/usr/bin/env python3
"""Draw runs side by side: validation metric over time, over epochs, and peak memory by kind.

    scripts/plot/plot_runs.py DIR... --out FIGURE.png [--title TEXT] [--allow-partial]

DIR holds run.json, or directories below it do. One row of panels for each model and metric. Runs that did not succeed,
or whose records are not sound, are named and refused (exit code 8) unless --allow-partial shows them with their status.
Transport, precision and backend stand in the labels as soon as they differ between the runs.
"""

import argparse
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import check_records  # noqa: E402  (found through the line above)

UNSUPPORTED = 4
# Okabe and Ito's palette: told apart with any colour vision. An engine has the same colour and marker in every figure.
ENGINE_STYLES = {
    "serial": ("#000000", "o"), "ddp": ("#0072B2", "s"), "zero": ("#D55E00", "D"), "lbann": ("#009E73", "^"),
    "megatron": ("#CC79A7", "v"), "pipedream": ("#56B4E9", "p"), "torchgpipe": ("#E69F00", "<"),
}
OTHER_STYLE = ("#777777", "*")
DASHES = ["-", "--", ":", "-."]
# Paul Tol's muted palette, ordered so that neighbours differ in lightness.
KIND_COLORS = {
    "parameters": "#332288", "weight_versions": "#88CCEE", "gradients": "#117733", "optimizer": "#DDCC77",
    "activations": "#CC6677", "communication": "#882255", "workspace": "#BBBBBB",
}
METRIC_LABELS = {"perplexity": "validation perplexity", "accuracy": "validation accuracy (%)"}
MOST_MARKED_EPOCHS = 25


class Run:
    """One run, reduced to what is drawn."""

    def __init__(self, directory, run, epochs, problems):
        self.directory, self.record, self.epochs, self.problems = directory, run, epochs, problems
        self.sound = run["status"] == "success" and not problems
        self.label = ""

    @property
    def group(self):
        metric = self.epochs[-1]["val_metric"]["name"] if self.epochs else ""
        return self.record["model"], metric

    def why_not(self):
        """Why this run is no result."""
        status = self.record["status"]
        if status != "success":
            return f"status {status}" + (f": {self.record['reason']}" if self.record["reason"] else "")
        return self.problems[0] if self.problems else "no epochs"

    def metric(self):
        """Values by epoch, in the units of METRIC_LABELS; gaps where they are not finite."""
        scale = 100.0 if self.group[1] == "accuracy" else 1.0
        values = [float(epoch["val_metric"]["value"]) * scale for epoch in self.epochs]
        return [value if math.isfinite(value) else math.nan for value in values]

    def elapsed_s(self):
        return [float(epoch["elapsed_s"]) for epoch in self.epochs]

    def peak_bytes(self, kind):
        return max(float(epoch["memory_peak_bytes"][kind]["max"]) for epoch in self.epochs)

    def lags(self):
        """By stage, how many updates old the weights of most gradients were."""
        return [max(range(len(counts)), key=lambda lag: counts[lag])
                for counts in (stage["updates_behind"] for stage in self.epochs[-1]["staleness"])]

    def predicted_bytes(self):
        return float(self.epochs[-1]["memory_predicted_bytes"]["total"])


def load(directories):
    """All runs; ends the program when there are none or one cannot be read."""
    runs = []
    for root in directories:
        found = check_records.find_runs(root)
        if not found:
            sys.exit(fail(f"{root}: no run.json here or below", check_records.NO_RECORDS))
        for directory in found:
            run, epochs, problems = check_records.read_run(directory)
            if run is None:
                sys.exit(fail(f"{directory}: {problems[0]}", check_records.NO_RECORDS))
            runs.append(Run(directory, run, epochs, problems))
    return runs


def fail(message, code):
    print(check_records.printable(f"error: {message}"), file=sys.stderr)
    return code


def admit(runs, allow_partial):
    """The runs to draw; None when some must be refused."""
    refused = [run for run in runs if not run.epochs or not (run.sound or allow_partial)]
    for run in refused:
        fail(f"{run.directory} ({run.record['name']}) is no result: {run.why_not()}", 0)
    if refused and not allow_partial:
        fail("not drawn; --allow-partial draws such runs with their status", 0)
        return None
    return [run for run in runs if run.epochs]


def conditions(run):
    """What two runs must share to be compared without a word. One rank sends nothing: any transport will do."""
    world = run.record["world"]
    transport = world["comm"] if world["ranks"] > 1 else None
    return {"comm": transport, "dtype": run.record["dtype"], "backend": run.record["backend"]}


def differing_conditions(runs):
    values = {key: {conditions(run)[key] for run in runs} - {None} for key in ("comm", "dtype", "backend")}
    return [key for key in values if len(values[key]) > 1]


def remarks(run, apart):
    """What a reader must know of a run before comparing it; `apart` are the conditions in which its row differs."""
    found = [conditions(run)[key] for key in apart if conditions(run)[key]]
    if run.record["backend"] != "cpu" and run.record["world"]["ranks_per_device"] > 1:
        found.append(f"{run.record['world']['ranks_per_device']} ranks share a GPU")
    if run.record["synthetic_data"]:
        found.append("synthetic data")
    if any(epoch["extrapolated"] for epoch in run.epochs):
        found.append("parts of epochs")
    if run.epochs and run.epochs[-1].get("staleness"):
        mode = run.record["config"].get("engine", {}).get("mode")
        found += [mode] if mode else []
        found.append("weights " + ", ".join(str(lag) for lag in run.lags()) + " updates behind")
    if not run.sound:
        found.append(run.record["status"] if run.record["status"] != "success" else "not sound")
    return found


def set_labels(runs, members):
    """Labels `members`, the runs of one row, by engine, ranks and what else sets them apart. Returns what they share,
    but not with all `runs` of the figure: it goes into the row's title."""
    apart = differing_conditions(members)
    labels = {run: (f"{run.record['engine']} \u00d7{run.record['world']['ranks']}", remarks(run, apart))
              for run in members}
    # Alike so far: the run's name may tell them apart, else where it lies.
    namesakes = {run: [other for other in members if labels[other] == labels[run]] for run in members}
    for run in members:
        head, parts = labels[run]
        names = {other.record["name"] for other in namesakes[run]}
        if len(namesakes[run]) > 1:
            place = "/".join(pathlib.Path(run.directory).parts[-2:])
            name = run.record["name"] if len(names) == len(namesakes[run]) else place
            parts = [check_records.printable(name), *parts]
        run.label = head + (f" ({', '.join(parts)})" if parts else "")
    shared = [key for key in differing_conditions(runs) if key not in apart]
    values = [next((conditions(run)[key] for run in members if conditions(run)[key]), None) for key in shared]
    return ", ".join(value for value in values if value)


def styles(runs):
    """Colour and marker by engine; dashes and filling tell an engine's runs apart."""
    seen = {}
    for order, run in enumerate(runs):
        color, marker = ENGINE_STYLES.get(run.record["engine"], OTHER_STYLE)
        index = seen[run.record["engine"]] = seen.get(run.record["engine"], -1) + 1
        # Engines that train the same thing lie on top of each other: earlier lines are wider, and show as a border.
        width = 1.6 + 2.6 * (1 - (order + 1) / len(runs))
        yield {"color": color, "marker": marker, "linestyle": DASHES[index % len(DASHES)], "linewidth": width,
               "markersize": 6 + width, "markeredgewidth": 0.8, "markeredgecolor": "white" if index == 0 else color,
               "markerfacecolor": color if index == 0 else "white"}


def time_unit(seconds):
    return (3600.0, "h") if seconds >= 7200 else (60.0, "min") if seconds >= 180 else (1.0, "s")


def byte_unit(count):
    return (2.0**30, "GiB") if count >= 2.0**30 else (2.0**20, "MiB") if count >= 2.0**20 else (2.0**10, "KiB")


def finish_metric_axes(axes, metric):
    from matplotlib import ticker
    axes.set_ylabel(METRIC_LABELS.get(metric, f"validation {metric}"))
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.8)
    axes.margins(x=0.04)
    if metric == "perplexity":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        # A decade or more has room for few numbers; less than that shows none at all unless they are dense.
        subs = (1, 2, 5) if high / low > 8 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
        if high / low < 1.6:
            axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
        else:
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=20))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def draw_metric(time_axes, epoch_axes, runs):
    from matplotlib import ticker
    metric = runs[0].group[1]
    divisor, unit = time_unit(max(run.elapsed_s()[-1] for run in runs))
    for run, style in zip(runs, styles(runs)):
        every = max(1, math.ceil(len(run.epochs) / MOST_MARKED_EPOCHS))
        epochs = [epoch["epoch"] + 1 for epoch in run.epochs]
        times = [seconds / divisor for seconds in run.elapsed_s()]
        time_axes.plot(times, run.metric(), label=run.label, markevery=every, **style)
        epoch_axes.plot(epochs, run.metric(), label=run.label, markevery=every, **style)
    evaluated = any(not math.isnan(value) for run in runs for value in run.metric())
    for axes in (time_axes, epoch_axes):
        finish_metric_axes(axes, metric)
        if not evaluated:
            axes.text(0.5, 0.5, "not evaluated", transform=axes.transAxes, ha="center")
    time_axes.set_xlabel(f"time since start ({unit})")
    time_axes.set_xlim(left=0)
    epoch_axes.set_xlabel("epoch")
    epoch_axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))


def draw_memory(axes, runs):
    kinds = [kind for kind in KIND_COLORS if any(run.peak_bytes(kind) > 0 for run in runs)]
    largest = max(max(sum(run.peak_bytes(kind) for kind in kinds), run.predicted_bytes()) for run in runs)
    divisor, unit = byte_unit(largest)
    rows = range(len(runs))
    left = [0.0] * len(runs)
    for kind in kinds:
        widths = [run.peak_bytes(kind) / divisor for run in runs]
        axes.barh(rows, widths, left=left, height=0.62, color=KIND_COLORS[kind], edgecolor="white", linewidth=0.6,
                  label=kind.replace("_", " "))
        left = [start + width for start, width in zip(left, widths)]
    # Kinds peak at different moments, so the peak of the total lies within the stack.
    totals = [run.peak_bytes("total") / divisor for run in runs]
    axes.vlines(totals, [row - 0.42 for row in rows], [row + 0.42 for row in rows], color="black", linewidth=2.2,
                label="peak of the total")
    axes.plot([run.predicted_bytes() / divisor for run in runs], rows, "D", markersize=8, markerfacecolor="white",
              markeredgecolor="black", markeredgewidth=1.4, linestyle="none", label="predicted", zorder=4)
    axes.set_yticks(list(rows), [run.label.replace(" (", "\n(", 1) for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.08 * max(largest / divisor, max(totals)) or 1)
    axes.set_xlabel(f"peak memory of the fullest rank, by kind ({unit})")
    axes.grid(True, axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def legend_below(axes, source, columns):
    handles, labels = source.get_legend_handles_labels()
    axes.axis("off")
    axes.legend(handles, labels, loc="upper center", ncol=columns, frameon=False, handlelength=3.2, borderaxespad=0)


def draw(runs, title, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    groups = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    heights, legend_columns, titles = [], [], []
    for (model, _), members in groups.items():
        shared = set_labels(runs, members)
        titles.append(f"{model} ({shared})" if shared else model)
        widest = max(len(run.label) for run in members)
        columns = 3 if widest < 26 else 2 if widest < 44 else 1
        legend_columns.append(columns)
        lines = max(math.ceil(len(members) / columns), 3)
        heights += [max(3.6, 1.2 + 0.52 * len(members)), 0.24 * lines + 0.1]
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 10.5, "axes.spines.top": False,
                         "axes.spines.right": False})
    figure = plt.figure(figsize=(16.5, sum(heights) + 0.6 * len(groups) + 0.5),
                        constrained_layout={"h_pad": 0.06, "w_pad": 0.06})
    grid = figure.add_gridspec(2 * len(groups), 3, height_ratios=heights, width_ratios=[1, 1, 1.05])
    for row, ((_, metric), members) in enumerate(groups.items()):
        panels = [figure.add_subplot(grid[2 * row, column]) for column in range(3)]
        draw_metric(panels[0], panels[1], members)
        draw_memory(panels[2], members)
        for panel, what in zip(panels, (f"{metric} over time", f"{metric} over epochs", "memory")):
            panel.set_title(f"{titles[row]}: {what}", loc="left")
        legend_below(figure.add_subplot(grid[2 * row + 1, :2]), panels[1], legend_columns[row])
        legend_below(figure.add_subplot(grid[2 * row + 1, 2]), panels[2], 3)
    if title:
        figure.suptitle(title, fontsize=14)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", metavar="DIR")
    parser.add_argument("--out", required=True, metavar="FIGURE.png")
    parser.add_argument("--title", default="")
    parser.add_argument("--allow-partial", action="store_true", help="draw runs without success too, with their status")
    options = parser.parse_args(arguments)
    runs = admit(load(options.directories), options.allow_partial)
    if runs is None:
        return check_records.CHECK_FAILED
    if not runs:
        return fail("no run has an epoch to draw", check_records.NO_RECORDS)
    try:
        draw(runs, options.title, options.out)
    except ImportError as error:
        return fail(f"drawing needs matplotlib: {error}", UNSUPPORTED)
    print(check_records.printable(f"{options.out}: {len(runs)} runs"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
