"""Loads a job trace and applies the user's options: window, filters, scaling, random replacements, models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.errors import InputError, unknown_name
from cotenant.core.units import counted
from cotenant.core.work import Floats, Jobs, Trace
from cotenant.workloads.jobs.draws import (
    check_rate,
    draw_choice,
    is_random,
    parse_arrivals,
    parse_durations,
    parse_gpu_mix,
    round_ms,
    stream,
)
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.jobs.split import assign_models, parse_split
from cotenant.workloads.table import MAX_SECONDS
from cotenant.workloads.trace_options import DEFAULT_SPLIT, GPU_COUNTS, SPLIT_MODES, TraceOptions

Times = Mapping[str, float]


def load_trace(
    spec: str,
    options: TraceOptions | None = None,
    *,
    classes: Mapping[str, Sequence[str]] | None = None,
    iteration_s: Times | None = None,
    lengths: bool = True,
    named_gpus: bool = False,
) -> Trace:
    """Read a trace and apply all options. InputError if no job is left.

    `classes` (image, language, speech -> models): models for jobs without one; None leaves their model "".
    `iteration_s` (model -> seconds per iteration) converts iterations to durations for options that need them.
    `lengths`: every job must state its run time or iterations. It is False for callers that need neither, such as
    simulations with `--policy sia`, where the profile of a model states how much work a job of that model is.
    `named_gpus`: if every job names its GPU models, jobs get models only by `options.split`.
    """
    options = options or TraceOptions()
    _check(options)
    trace = read_trace(spec, options).require_jobs()
    _filter(trace, options, iteration_s)
    trace.require_jobs()
    _rearrange(trace, options)
    _redraw(trace, options, iteration_s)
    if lengths and (np.isnan(trace.jobs.duration_s) & np.isnan(trace.jobs.iterations)).any():
        what = "the trace states no durations; draw them with --durations"
        if trace.source.startswith("sia:"):
            what = "a workload of Sia has no durations, as profiles have its jobs' work: add --durations to draw some"
        raise InputError(what, file=trace.source)
    named = named_gpus and not options.split and bool((trace.jobs.gpu_models != "").all())
    if classes is not None and not named:
        _give_models(trace, options, classes, iteration_s)
    return trace


def durations_of(jobs: Jobs, iteration_s: Times | None) -> Floats:
    """Return the run time of each job if it shares its GPUs with no other job and gets CPU and memory in proportion to
    its number of GPUs. This is the stated duration, else iterations times the model's time per iteration, else NaN.
    """
    durations = jobs.duration_s.copy()
    unknown = np.isnan(durations)
    if iteration_s and unknown.any():
        times = np.array([iteration_s.get(model, math.nan) for model in jobs.model[unknown].tolist()])
        durations[unknown] = jobs.iterations[unknown] * times
    return durations


def _check(options: TraceOptions) -> None:
    if not options.from_s < options.to_s:
        raise InputError("--from must be before --to", field="from")
    if options.max_jobs is not None and options.max_jobs < 1:
        raise InputError(f"{options.max_jobs} jobs; at least 1 is needed", field="max-jobs")
    if not (0 < options.rate_scale < math.inf):
        raise InputError(f"{options.rate_scale:g} is not above 0; 2 means twice as fast", field="rate-scale")
    if options.gpu_counts not in GPU_COUNTS:
        raise unknown_name("treatment", options.gpu_counts, GPU_COUNTS, "gpu-counts")
    if options.split_mode not in SPLIT_MODES:
        raise unknown_name("mode", options.split_mode, SPLIT_MODES, "split-mode")
    if options.rate_per_s is not None and not options.arrivals:
        raise InputError(
            "--rate needs --arrivals; to change the rate of the trace's own arrivals, use --rate-scale", field="rate"
        )
    if options.rate_per_s is not None and options.arrivals == "static":
        raise InputError("static arrivals have no rate; leave --rate out", field="rate")
    if options.rate_per_s is not None:
        check_rate(options.rate_per_s)
    if options.split:
        parse_split(options.split)
    # the random stream is made so that a wrong seed is reported even if nothing is drawn
    stream(options.seed, "arrivals")


def _keep(trace: Trace, rows: NDArray[np.bool_], reason: str) -> None:
    dropped = len(rows) - int(rows.sum())
    if dropped:
        trace.left_out[reason] = trace.left_out.get(reason, 0) + dropped
        trace.jobs = trace.jobs.take(rows)


def _filter(trace: Trace, options: TraceOptions, iteration_s: Times | None) -> None:
    jobs = trace.jobs
    if options.from_s > 0 or options.to_s < math.inf:
        _keep(trace, (jobs.arrival_s >= options.from_s) & (jobs.arrival_s < options.to_s), "outside the window")
    if options.tenants:
        known = set(jobs.tenant.tolist())
        for tenant in options.tenants:
            if tenant not in known:
                some = ", ".join(sorted(known - {""})[:15]) or "none stated"
                raise InputError(f"no tenant {tenant!r}; the trace has {some}", file=trace.source, field="tenant")
        _keep(trace, np.isin(trace.jobs.tenant.astype(str), options.tenants), "of other tenants")
    if options.gpu_counts == "single":
        _keep(trace, trace.jobs.gpus <= 1, "on more than 1 GPU")
    elif options.gpu_counts == "multi":
        _keep(trace, trace.jobs.gpus > 1, "on 1 GPU or less")
    if options.only_gpus:
        wanted = ",".join(str(count) for count in options.only_gpus)
        _keep(trace, np.isin(trace.jobs.gpus, options.only_gpus), f"with a GPU count not among {wanted}")
    if options.gpu_counts == "as-single":
        trace.jobs.gpus = np.ones(len(trace.jobs))
    if options.min_duration_s > 0 or options.max_duration_s < math.inf:
        durations = durations_of(trace.jobs, iteration_s)
        if np.isnan(durations).any():
            raise InputError(
                "some jobs have only iterations of a model without a profile, so that their durations are unknown",
                file=trace.source,
                field="min-duration",
            )
        inside = (durations >= options.min_duration_s) & (durations <= options.max_duration_s)
        _keep(trace, inside, "with a duration outside the limits")
    if options.max_jobs is not None:
        first = np.arange(len(trace.jobs)) < options.max_jobs
        _keep(trace, first, f"beyond the first {counted(options.max_jobs, 'job')}")


def _rearrange(trace: Trace, options: TraceOptions) -> None:
    """Shift the jobs' arrivals so that the start of the time window is 0, then replace or scale them. A job's deadline
    moves with its arrival.
    """
    jobs = trace.jobs
    before = jobs.arrival_s
    if options.from_s > 0:
        jobs.arrival_s = jobs.arrival_s - options.from_s
    if options.arrivals:
        draw = parse_arrivals(options.arrivals, lambda spec: read_trace(spec).require_jobs().jobs.arrival_s)
        rate = options.rate_per_s if options.rate_per_s is not None else _own_rate(trace, options)
        jobs.arrival_s = round_ms(draw(stream(options.seed, "arrivals"), len(jobs), rate), "arrivals")
        at = "" if math.isnan(rate) else f" at {rate * 3600:.4g} jobs/h"
        seeded = ""
        if is_random(options.arrivals):
            trace.seed, seeded = options.seed, f" (seed {options.seed})"
        trace.remarks.append(f"arrivals replaced: {options.arrivals}{at}{seeded}")
    if options.rate_scale != 1:
        with np.errstate(over="ignore"):
            jobs.arrival_s = jobs.arrival_s / options.rate_scale
        if not jobs.arrival_s[-1] <= MAX_SECONDS:
            raise InputError(f"{options.rate_scale:g} gives arrivals above {MAX_SECONDS:g} s", field="rate-scale")
        trace.remarks.append(f"the arrival rate is {options.rate_scale:g} times the trace's")
    jobs.deadline_s = jobs.arrival_s + (jobs.deadline_s - before)


def _own_rate(trace: Trace, options: TraceOptions) -> float:
    if options.arrivals == "static" or options.arrivals.startswith("trace:"):
        return math.nan  # these arrivals replace those of the trace, whose rate is not kept
    arrival_s = trace.jobs.arrival_s
    span_s = float(arrival_s[-1] - arrival_s[0])
    if span_s <= 0:
        raise InputError("all jobs of the trace arrive at the same time, so it has no rate; add --rate", field="rate")
    return (len(arrival_s) - 1) / span_s


def _redraw(trace: Trace, options: TraceOptions, iteration_s: Times | None) -> None:
    jobs = trace.jobs
    if options.durations:
        draw = parse_durations(options.durations, lambda spec: durations_in(spec, iteration_s))
        jobs.duration_s = round_ms(draw(stream(options.seed, "durations"), len(jobs)), "durations")
        jobs.iterations = np.full(len(jobs), np.nan)
        trace.remarks.append(f"durations replaced: {options.durations} (seed {options.seed})")
        trace.seed = options.seed
    if options.gpu_mix:
        jobs.gpus = draw_choice(stream(options.seed, "gpus"), len(jobs), *parse_gpu_mix(options.gpu_mix))
        trace.remarks.append(f"GPU counts replaced: {options.gpu_mix} (seed {options.seed})")
        trace.seed = options.seed


def gpu_times_in(spec: str, iteration_s: Times | None = None) -> Floats:
    """Return the GPU-seconds of a trace's jobs (duration x GPUs). The numbers of a CSV file with the one column
    `duration` are taken as GPU-seconds.
    """
    return durations_in(spec, iteration_s, times_gpus=True)


def durations_in(spec: str, iteration_s: Times | None = None, *, times_gpus: bool = False) -> Floats:
    """Return the durations of the jobs of a trace (FORMAT:PATH), or of a one-column CSV file with the header
    `duration`.

    `times_gpus`: multiply each duration by the job's number of GPUs.
    """
    from cotenant.workloads.table_files import read_csv

    if spec.endswith(".csv") and ":" not in spec:
        table = read_csv(spec, ("duration", "duration_s"))
        if table.header == ("duration",):
            values = table.numbers("duration", above=0, most=MAX_SECONDS)
            if not len(values):
                raise InputError("the file has no durations", file=spec)
            return values
    jobs = read_trace(spec).require_jobs().jobs
    durations = durations_of(jobs, iteration_s) * (jobs.gpus if times_gpus else 1.0)
    durations = durations[~np.isnan(durations)]
    if not len(durations):
        raise InputError("the trace states no durations (only iterations)", file=spec, field="durations")
    return durations


def _give_models(
    trace: Trace, options: TraceOptions, classes: Mapping[str, Sequence[str]], iteration_s: Times | None
) -> None:
    jobs = trace.jobs
    absent = np.array([model == "" for model in jobs.model.tolist()])
    rows = np.ones(len(jobs), dtype=bool) if options.split else absent
    if not rows.any():
        return
    durations = durations_of(jobs, iteration_s)
    if np.isnan(durations[rows]).any():
        row = int(np.flatnonzero(rows & np.isnan(durations))[0])
        why = f"its model {jobs.model[row]!r} has no profile" if jobs.model[row] else "it has no model"
        raise InputError(
            f"job {jobs.id[row]!r} states only iterations, and {why}, so its duration is unknown; a job that gets "
            "another model needs a duration",
            file=trace.source,
            field="iterations",
        )
    split = options.split or DEFAULT_SPLIT
    jobs.model = jobs.model.copy()
    jobs.model[rows] = assign_models(int(rows.sum()), split, classes, mode=options.split_mode, seed=options.seed)
    # the job's duration is kept, but its number of iterations is removed, since that was the number of another model
    jobs.duration_s = np.where(rows, durations, jobs.duration_s)
    jobs.iterations = np.where(rows, np.nan, jobs.iterations)
    if options.split_mode == "random":
        trace.seed = options.seed
    how = "in turn" if options.split_mode == "overall" else f"at random, seed {options.seed}"
    served = counted(int(rows.sum()), "job")
    trace.remarks.append(f"{served} got models by the split {split} (image,language,speech; {how})")
