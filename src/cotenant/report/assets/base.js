"use strict";
// Data, state, theme and the formats of numbers. Everything else is in charts.js and page.js.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = 10;
const DASHES = ["solid", "dash", "dot", "dashdot"];
const TOUCH = matchMedia("(pointer: coarse)").matches;

const state = {
  hidden: new Set(),
  facet: { ...DATA.opens }, // of each facet the value whose runs are drawn
  sweepX: null,
  sweepY: "jct_s.mean",
  groups: null,
};

const matches = (run, except) => DATA.facets.every((f) => f.key === except || run.facets[f.key] === state.facet[f.key]);
const chipOf = (run) => (DATA.byPolicy ? run.policy : run.label);
const shownRuns = () => DATA.runs.filter((run) => (!DATA.byPolicy || matches(run)) && !state.hidden.has(chipOf(run)));
const nameOf = (run) => (DATA.byPolicy ? run.policy : run.label);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (run) => css(`--c${run.color % COLORS}`);
const dash = (run) => DASHES[Math.floor(run.color / COLORS) % DASHES.length];

function faded(hex, alpha) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
}

// like figures() of the tables: trailing zeros stay, but for round ticks of an axis
function figures(value, n = 3, trim = false) {
  if (value === 0) return "0";
  value = Number(value.toPrecision(n));
  const decimals = n - 1 - Math.floor(Math.log10(Math.abs(value)));
  if (decimals <= 0) {
    const step = 10 ** -decimals;
    return (Math.round(value / step) * step).toLocaleString("en-US", { maximumFractionDigits: 0 });
  }
  const digits = Math.min(decimals, 20);
  return value.toLocaleString("en-US", { minimumFractionDigits: trim ? 0 : digits, maximumFractionDigits: digits });
}

function timeText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995) return `${figures(seconds * 1e3)} ms`;
  for (const [limit, scale, unit] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]]) {
    if (size < limit) return `${figures(seconds / scale)} ${unit}`;
  }
  return `${figures(seconds / 86400)} d`;
}

const shareText = (share) => (share === null || share === undefined ? "–" : `${(share * 100).toFixed(1)} %`);
const FORMATS = { s: timeText, share: shareText, ratio: (x) => (x === null ? "–" : figures(x)), count: (x) => Math.round(x).toLocaleString("en-US") };

const lookup = (summary, key) => key.split(".").reduce((value, part) => (value ? value[part] ?? null : null), summary);

// round times for the ticks of a logarithmic axis, coarse ones first: as many sets are used as leave the axis readable
const M = 60, H = 3600, D = 86400;
const TIME_TICKS = [
  [[1e-3, "1 ms"], [0.01, "10 ms"], [0.1, "100 ms"], [1, "1 s"], [10, "10 s"], [M, "1 min"], [10 * M, "10 min"], [H, "1 h"], [10 * H, "10 h"], [4 * D, "4 d"], [40 * D, "40 d"], [400 * D, "400 d"]],
  [[3, "3 s"], [30, "30 s"], [3 * M, "3 min"], [30 * M, "30 min"], [3 * H, "3 h"], [D, "1 d"], [10 * D, "10 d"], [100 * D, "100 d"]],
  [[2, "2 s"], [5, "5 s"], [20, "20 s"], [2 * M, "2 min"], [5 * M, "5 min"], [20 * M, "20 min"], [2 * H, "2 h"], [5 * H, "5 h"], [15 * H, "15 h"], [2 * D, "2 d"], [6 * D, "6 d"], [20 * D, "20 d"], [60 * D, "60 d"]],
  [[15, "15 s"], [45, "45 s"], [15 * M, "15 min"], [45 * M, "45 min"], [1.5 * H, "1.5 h"], [4 * H, "4 h"], [6 * H, "6 h"], [8 * H, "8 h"], [12 * H, "12 h"], [20 * H, "20 h"], [1.5 * D, "1.5 d"], [3 * D, "3 d"], [8 * D, "8 d"], [14 * D, "14 d"]],
];

// a linear time axis: one unit for all runs drawn on it
function timeUnit(seconds) {
  for (const [limit, scale, unit] of [[300, 1, "seconds"], [3 * 3600, 60, "minutes"], [5 * 86400, 3600, "hours"]]) {
    if (seconds < limit) return { scale, unit };
  }
  return { scale: 86400, unit: "days" };
}

function baseLayout(extra) {
  const axis = {
    gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, tickcolor: css("--line"), automargin: true,
    title: { font: { size: 12.5, color: css("--soft") }, standoff: 8 }, tickfont: { size: 12, color: css("--soft") },
    fixedrange: TOUCH, nticks: innerWidth < 600 ? 5 : 8,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: css("--font"), color: css("--ink"), size: 12.5 },
    margin: { l: 48, r: 12, t: 8, b: 44 }, hovermode: "closest", dragmode: TOUCH ? false : "zoom",
    hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--line"), font: { family: css("--font"), color: css("--ink"), size: 13 }, align: "left", namelength: -1 },
    ...extra,
    xaxis: merge(axis, extra.xaxis), yaxis: merge(axis, extra.yaxis),
  };
}

function merge(axis, extra = {}) {
  const title = typeof extra.title === "string" ? { ...axis.title, text: extra.title } : axis.title;
  return { ...axis, ...extra, title };
}

function logTimeAxis(values, title) {
  const [low, high] = range(values);
  const most = innerWidth < 600 ? 5 : 8;
  let ticks = [];
  for (const set of TIME_TICKS) {
    const more = [...ticks, ...set.filter(([v]) => v >= low / 1.01 && v <= high * 1.01)];
    if (ticks.length >= 3 && more.length > most) break;
    ticks = more;
  }
  ticks = ticks.sort((a, b) => a[0] - b[0]);
  // labels that would touch give way to the one before
  const least = (Math.log(high / low) * (innerWidth < 600 ? 60 : 42)) / (innerWidth < 600 ? 290 : 480);
  ticks = ticks.reduce((kept, tick) => (kept.length && Math.log(tick[0] / kept.at(-1)[0]) < least ? kept : [...kept, tick]), []);
  if (ticks.length < 2) return { type: "log", title: `${title}, seconds` };
  const pad = Math.log10(high / low) * 0.02;
  return { type: "log", title, tickvals: ticks.map((t) => t[0]), ticktext: ticks.map((t) => t[1]), range: [Math.log10(low) - pad, Math.log10(high) + pad] };
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v > 0) { if (v < low) low = v; if (v > high) high = v; }
  return low === Infinity ? [1, 10] : low === high ? [low / 2, high * 2] : [low, high];
}
