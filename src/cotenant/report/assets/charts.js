"use strict";
// One entry per chart: what it is called, how to read it, and a function from the shown runs to Plotly traces and layout.

const line = (run, extra) => ({
  type: "scatter", mode: "lines", name: nameOf(run), hoverlabel: { bordercolor: color(run) }, line: { color: color(run), width: 2.2, dash: dash(run), ...(extra.line || {}) },
  ...Object.fromEntries(Object.entries(extra).filter(([k]) => k !== "line")),
});

function cdf(runs, key, { floor = 0, time = true, title, mark = null }) {
  const drawn = runs.filter((run) => run.cdf[key].x.length);
  const traces = drawn.map((run) => {
    const { x, y } = run.cdf[key];
    const shown = x.map((v) => Math.max(v, floor));
    return line(run, {
      x: [shown[0], ...shown], y: [0, ...y], line: { shape: "hv" },
      text: ["", ...x.map((v, i) => `${shareText(y[i])} within ${time ? timeText(v) : figures(v)}`)],
      hovertemplate: "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
    });
  });
  const all = traces.flatMap((t) => t.x);
  const xaxis = time ? logTimeAxis(all, title) : { type: "log", title, ...plainTicks(all) };
  const layout = { xaxis, yaxis: { title: "share of jobs", tickformat: ".0%", range: [0, 1.02] } };
  if (mark !== null) layout.shapes = [{ type: "line", x0: mark, x1: mark, y0: 0, y1: 1, yref: "paper", line: { color: css("--faint"), width: 1.2, dash: "dot" } }];
  return { traces, layout };
}

function plainTicks(values) {
  const [low, high] = range(values);
  const steps = [];
  for (let e = -3; e < 7; e++) for (const m of high / low > 300 ? [1] : high / low > 20 ? [1, 3] : [1, 1.5, 2, 3, 5, 7]) steps.push(m * 10 ** e);
  const ticks = steps.filter((v) => v >= low / 1.05 && v <= high * 1.05);
  const pad = Math.log10(high / low) * 0.03;
  return { tickvals: ticks, ticktext: ticks.map((v) => figures(v, 3, true)), range: [Math.log10(low) - pad, Math.log10(high) + pad] };
}

function overTime(runs, pick, { title, percent = true, held = null, mark = null }) {
  const { scale, unit } = timeUnit(Math.max(...runs.map((run) => run.series.to), 0));
  const traces = [];
  const step = (run, values, extra) => {
    const { from, to } = run.series;
    const width = (to - from) / values.length;
    const x = values.map((_, i) => (from + i * width) / scale);
    const text = values.map((v) => (percent ? shareText(v) : figures(v, 3, true)));
    return line(run, { x: [...x, to / scale], y: [...values, values.at(-1)], text: [...text, text.at(-1)], line: { shape: "hv", width: 1.8, ...extra.line }, hovertemplate: `<b>%{fullData.name}</b><br>${extra.note || ""}%{text} at ${unit.slice(0, -1)} %{x:.1f}<extra></extra>`, ...Object.fromEntries(Object.entries(extra).filter(([k]) => k !== "line" && k !== "note")) });
  };
  for (const run of runs) {
    if (held && held(run)) traces.push(step(run, held(run), { line: { width: 1.1, dash: "dot" }, note: "held: ", opacity: 0.75, showlegend: false }));
  }
  for (const run of runs) if (pick(run)) traces.push(step(run, pick(run), {}));
  const top = Math.max(...traces.flatMap((t) => t.y), 0);
  const yaxis = percent
    ? { tickformat: ".0%", range: [0, Math.max(mark ? 1.02 : 0, Math.min(Math.max(top * 1.06, 0.05), Math.max(1.02, top * 1.06)))], title }
    : { range: [0, top * 1.06 || 1], title };
  const layout = { xaxis: { title: `${unit} since the start of the trace` }, yaxis };
  if (mark) layout.shapes = [{ type: "line", x0: 0, x1: 1, xref: "paper", y0: mark, y1: mark, line: { color: css("--faint"), width: 1.2, dash: "dot" } }];
  return { traces, layout };
}

const PERCENTILES = [["median", "median", "circle"], ["p95", "p95", "diamond"], ["p99", "p99", "square"], ["p999", "p99.9", "triangle-right"]];

// few rows stand together in the middle instead of at the far edges
const rowRange = (n) => (n < 5 ? [-0.6 - (5 - n) / 3, n - 0.4 + (5 - n) / 3] : [-0.6, n - 0.4]);

function percentiles(runs) {
  const drawn = runs.filter((run) => run.summary.jct_s.mean !== null).reverse();
  const traces = drawn.map((run) => {
    const at = PERCENTILES.map(([key]) => run.summary.jct_s[key]);
    return {
      type: "scatter", mode: "lines+markers", name: nameOf(run), x: at, y: at.map(() => nameOf(run)), line: { color: faded(color(run), 0.35), width: 5 },
      marker: { color: color(run), size: 11, symbol: PERCENTILES.map((p) => p[2]), line: { color: css("--surface"), width: 1.5 } },
      text: PERCENTILES.map(([, name], i) => `${name} ${timeText(at[i])}`), hovertemplate: "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
    };
  });
  traces.push({
    type: "scatter", mode: "markers", name: "mean", x: drawn.map((run) => run.summary.jct_s.mean), y: drawn.map(nameOf), showlegend: false,
    marker: { symbol: "line-ns", size: 17, color: css("--ink"), line: { width: 2.5, color: css("--ink") } }, text: drawn.map((run) => `mean ${timeText(run.summary.jct_s.mean)}`), hovertemplate: "<b>%{y}</b><br>%{text}<extra></extra>",
  });
  return { traces, layout: { xaxis: logTimeAxis(traces.flatMap((t) => t.x), "job completion time"), yaxis: { automargin: true, ticksuffix: "  ", nticks: 0, range: rowRange(drawn.length), tickfont: { size: 12, color: css("--ink") } } }, height: Math.max(300, 90 + 34 * drawn.length) };
}

function ratio(runs) {
  const drawn = runs.filter((run) => run.ratio);
  const traces = drawn.map((run) => line(run, {
    x: run.ratio.x, y: run.ratio.y, line: { shape: "hv" }, text: run.ratio.x.map((v, i) => `${shareText(run.ratio.y[i])} of jobs take at most ${figures(v)}× as long`),
    hovertemplate: "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
  }));
  const { layout } = cdf([], "jct_s", { title: "" });
  const all = traces.flatMap((t) => t.x);
  layout.xaxis = { type: "log", title: `completion time against ${DATA.baseline}`, ...plainTicks(all) };
  layout.shapes = [{ type: "line", x0: 1, x1: 1, y0: 0, y1: 1, yref: "paper", line: { color: css("--faint"), width: 1.2, dash: "dot" } }];
  layout.annotations = [["← faster", 0.02, "left", 1, "top"], ["slower →", 0.98, "right", 0.03, "bottom"]].map(([text, x, anchor, y, yanchor]) => ({ text, x, y, xref: "paper", yref: "paper", xanchor: anchor, yanchor, showarrow: false, font: { size: 12, color: css("--faint") } }));
  return { traces, layout };
}

const GROUP_NAMES = { gpus: "GPU count", class: "class", model: "model", tenant: "tenant" };

function groups(runs) {
  const by = state.groups;
  const names = [...new Set(runs.flatMap((run) => (run.groups[by] || []).map((g) => g[0])))];
  const traces = runs.filter((run) => run.groups[by]).map((run) => {
    const rows = names.map((name) => run.groups[by].find((g) => g[0] === name) || [name, 0, null, null, null]);
    return {
      type: "bar", name: nameOf(run), x: names, y: rows.map((r) => (r[2] === null ? null : r[2] / 3600)), marker: { color: color(run), line: { width: 0 } },
      text: rows.map((r) => `mean ${timeText(r[2])}, median ${timeText(r[3])}, p99 ${timeText(r[4])} (${r[1].toLocaleString("en-US")} jobs)`), textposition: "none", hovertemplate: "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
    };
  });
  return { traces, layout: { barmode: "group", bargap: traces.length < 3 ? 0.6 : 0.28, bargroupgap: 0.08, barcornerradius: 3, xaxis: { nticks: 0, type: "category" }, yaxis: { title: "mean completion time, hours", rangemode: "tozero" } } };
}

// ---- one condition against a result, a line per policy; runs that differ only by seed are averaged

const SWEEP_Y = [["jct_s.mean", "mean JCT", "s"], ["jct_s.p99", "p99 JCT", "s"], ["queueing_s.mean", "queueing", "s"], ["makespan_s", "makespan", "s"], ["utilisation.gpu", "GPU use", "share"], ["utilisation.cpu", "CPU use", "share"]];

function sweep() {
  const x = state.sweepX, unit = SWEEP_Y.find((y) => y[0] === state.sweepY)[2];
  const facet = DATA.facets.find((f) => f.key === x);
  const numbers = facet.values.map((v) => parseFloat(v));
  const numeric = facet.values.every((v) => /^[0-9.]+(\/\w+|%)?$/.test(v));
  const traces = [];
  const all = [];
  for (const policy of DATA.policies.filter((p) => !state.hidden.has(p) || !DATA.byPolicy)) {
    const mine = DATA.runs.filter((run) => run.policy === policy && DATA.facets.every((f) => f.key === x || f.key === "seed" || run.facets[f.key] === state.facet[f.key]));
    const points = facet.values.map((value, i) => {
      const ys = mine.filter((run) => run.facets[x] === value).map((run) => lookup(run.summary, state.sweepY)).filter((y) => y !== null);
      return ys.length ? { x: numeric ? numbers[i] : value, y: ys.reduce((a, b) => a + b) / ys.length, low: Math.min(...ys), high: Math.max(...ys), n: ys.length } : null;
    }).filter(Boolean);
    if (!points.length) continue;
    all.push(...points.map((p) => p.high));
    traces.push({ run: { policy, label: policy, color: DATA.byPolicy ? DATA.policies.indexOf(policy) : 0 }, points });
  }
  const { scale, unit: timeName } = unit === "s" ? timeUnit(Math.max(...all, 0)) : { scale: 1 };
  const drawn = traces.map(({ run, points }) => ({
    ...line(run, { x: points.map((p) => p.x), y: points.map((p) => p.y / scale), line: { width: 2.6 } }), name: run.policy, mode: "lines+markers", marker: { size: 8, color: color(run) },
    error_y: points.some((p) => p.n > 1) ? { type: "data", symmetric: false, array: points.map((p) => (p.high - p.y) / scale), arrayminus: points.map((p) => (p.y - p.low) / scale), color: faded(color(run), 0.5), thickness: 1.4, width: 3 } : undefined,
    text: points.map((p) => FORMATS[unit](p.y) + (p.n > 1 ? ` (${p.n} seeds, ${FORMATS[unit](p.low)} to ${FORMATS[unit](p.high)})` : "")), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
  }));
  const name = SWEEP_Y.find((y) => y[0] === state.sweepY)[1];
  const yaxis = unit === "share" ? { title: name, tickformat: ".0%", rangemode: "tozero" } : { title: `${name}, ${timeName}`, rangemode: "tozero" };
  return { traces: drawn, layout: { xaxis: { spikecolor: css("--faint"), spikethickness: 1, spikedash: "dot", title: x === "load" && numeric && Math.max(...numbers) <= 3 ? "offered load" : facet.name, type: numeric ? "linear" : "category", ...(numeric && numbers.length <= 10 ? { tickvals: numbers, ticktext: facet.values } : {}) }, yaxis, hovermode: "x unified" }, height: 400 };
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

const CHARTS = {
  sweep: { title: () => capital(`${SWEEP_Y.find((y) => y[0] === state.sweepY)[1]} by ${DATA.facets.find((f) => f.key === state.sweepX).name}`), how: "Each line is a policy. For times, lower is better; a cluster is in use for longer where jobs are slower. Bars span the seeds where there are several. Offered load is the GPU-time that arrives against the GPU-time the cluster has.", draw: sweep },
  jct: { title: "Completion times", how: "The height of a curve is the share of jobs done within the time below it. Further left is better; the far right is the tail.", draw: (runs) => cdf(runs, "jct_s", { floor: 0.01, title: "job completion time" }) },
  percentiles: { title: "Completion times at a glance", how: "● median ◆ p95 ■ p99 ▸ p99.9, and | the mean. A short bar far to the left is a fast and even policy.", draw: percentiles },
  ratio: { title: () => `Who gains, who pays`, how: () => `Each job against itself under ${DATA.baseline}. What lies left of 1 got faster; the height at 1 is the share of jobs that lost nothing.`, draw: ratio, when: () => DATA.runs.some((run) => run.ratio) },
  groups: { title: () => `Completion time by ${GROUP_NAMES[state.groups]}`, how: () => {
      const shown = Math.max(0, ...DATA.runs.map((run) => (run.groups[state.groups] || []).length));
      const all = Math.max(0, ...DATA.runs.map((run) => run.groupCounts[state.groups] || 0));
      return `Mean over the completed jobs of each group; hover for median, p99 and the number of jobs.${all > shown ? ` The ${shown} largest of ${all} groups.` : ""}`;
    },
    draw: groups, when: () => DATA.runs.some((run) => Object.keys(run.groups).length), control: true },
  queueing: { title: "Queueing delay", how: "Time without GPUs. The left end is the share of jobs that waited at most a second.", draw: (runs) => cdf(runs, "queueing_s", { floor: 1, title: "time waited" }) },
  slowdown: { title: "Slowdown", how: "Completion time against running alone at the proportional share. Left of 1: faster than that.", draw: (runs) => cdf(runs, "slowdown", { time: false, title: "slowdown", mark: 1 }) },
  fairness: { title: "Finish-time fairness", how: "ρ, completion time against an equal share of the cluster. What lies right of 1 got less than its share.", draw: (runs) => cdf(runs, "ftf_rho", { time: false, title: "ρ", mark: 1 }) },
  gpu: { title: "GPUs in use", how: "Share of the cluster's GPUs that jobs hold.", draw: (runs) => overTime(runs, (r) => r.series.gpu, { title: "of all GPUs" }) },
  cpu: { title: "CPU cores", how: "Solid: held and of use to the job. Dotted: held. The gap is handed to jobs that cannot use it.", draw: (runs) => overTime(runs, (r) => r.series.useful_cpu, { title: "of all cores", held: (r) => r.series.cpu }) },
  memory: { title: "Memory", how: "Solid: held and of use to the job. Dotted: held.", draw: (runs) => overTime(runs, (r) => r.series.useful_memory, { title: "of all memory", held: (r) => r.series.memory }) },
  waiting: { title: "Jobs waiting", how: "Arrived, not finished, and without GPUs.", draw: (runs) => overTime(runs, (r) => r.series.waiting, { percent: false, title: "jobs" }) },
  running: { title: "Jobs running", how: "Holding GPUs.", draw: (runs) => overTime(runs, (r) => r.series.running, { percent: false, title: "jobs" }) },
  wanted: { title: "GPUs wanted", how: "By running and waiting jobs, against the cluster's. Above the line at 100 % some job must wait.", draw: (runs) => overTime(runs, (r) => r.series.wanted, { title: "of all GPUs", mark: 1 }) },
  fragmentation: { title: "Fragmentation", how: "GPUs that are free on partly used nodes while jobs wait. Zero is best.", draw: (runs) => overTime(runs, (r) => r.series.stranded, { title: "of all GPUs" }), when: () => DATA.runs.some((run) => run.series.stranded) },
};
