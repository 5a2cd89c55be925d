"use strict";
// Charts of language models under load, drawn anew when the theme changes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => css(`--c${i % 10}`);

function layout(height, more) {
  return {
    height, margin: { l: 64, r: 16, t: 8, b: 48 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 13, color: css("--ink") }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, ...more,
  };
}
const axis = (title, more) => ({ title: { text: title }, gridcolor: css("--grid"), zerolinecolor: css("--line"), automargin: true, ...more });
const OPTIONS = { displayModeBar: false, responsive: true };
// a line needs two neighbouring windows with requests; a window without such a neighbour is drawn as a marker
const lone = (y) => y.map((v, i) => (v != null && y[i - 1] == null && y[i + 1] == null ? 8 : 0));

// a distribution rises from 0, so that one of a single value has a line, too
const rising = (values, first) => (values.length ? [first, ...values] : []);

function drawDistribution(id) {
  const traces = DATA.models.map((m, i) => ({
    type: "scatter", mode: "lines", name: m.name, line: { color: color(i), shape: "hv" }, x: rising(m[id].x, m[id].x[0]), y: rising(m[id].y, 0),
    hovertemplate: "%{x:.1f} ms: %{y:.2%}<extra>" + m.name + "</extra>",
  }));
  const shapes = DATA.models.flatMap((m, i) => (m[id].promise === null ? [] : [{
    type: "line", x0: m[id].promise, x1: m[id].promise, y0: 0, y1: 1, yref: "paper", line: { color: color(i), dash: "dot", width: 1 },
  }]));
  const all = DATA.models.flatMap((m) => m[id].x).filter((ms) => ms > 0);
  const wide = all.length && Math.max(...all) > 200 * Math.min(...all); // best-effort models wait for minutes, others for milliseconds
  const scale = wide ? { type: "log", dtick: 1 } : { rangemode: "tozero" };
  Plotly.react(id, traces, layout(320, { shapes, xaxis: axis("ms", scale), yaxis: axis("share", { range: [0, 1.02], tickformat: ".0%" }) }), OPTIONS);
}

function drawStays() {
  document.getElementById("stays-part").hidden = !DATA.stays.length; // a load test does not see the GPUs
  if (!DATA.stays.length) return;
  const gpus = new Set(DATA.stays.map((s) => s.gpu)).size;
  const traces = [false, true].map((moving) => {
    const rows = DATA.stays.filter((s) => s.moving === moving);
    return {
      type: "bar", orientation: "h", showlegend: false, y: rows.map((s) => DATA.models[s.model].name), base: rows.map((s) => s.start),
      x: rows.map((s) => s.end - s.start), marker: { color: rows.map((s) => color(s.model)), opacity: moving ? 0.35 : 1 },
      text: rows.map((s) => (gpus > 1 && !moving ? `GPU ${s.gpu}` : "")), textangle: 0, constraintext: "inside", textposition: "inside", textfont: { color: "#fff" },
      customdata: rows.map((s) => [s.end, s.gpu]), hovertemplate: "%{base:.1f} to %{customdata[0]:.1f} s, GPU %{customdata[1]}<extra>%{y}</extra>",
    };
  });
  Plotly.react("stays", traces, layout(80 + 30 * DATA.models.length, {
    barmode: "overlay", bargap: 0.3, xaxis: axis("s", { rangemode: "tozero" }),
    yaxis: axis("", { autorange: "reversed", type: "category", categoryorder: "array", categoryarray: DATA.models.map((m) => m.name) }),
  }), OPTIONS);
}

function draw() {
  drawStays();
  drawDistribution("ttft");
  drawDistribution("tpot");
  const known = DATA.models.some((m) => m.attainment.some((v) => v != null));
  document.getElementById("time-part").hidden = !known; // nothing is in time or late without SLOs
  if (!known) return;
  const traces = DATA.models.map((m, i) => ({
    type: "scatter", mode: "lines+markers", name: m.name, line: { color: color(i) }, x: DATA.windows_s, y: m.attainment,
    marker: { size: lone(m.attainment), opacity: 1, line: { width: 0 } }, cliponaxis: false,
    hovertemplate: "%{x:.0f} s: %{y:.2%}<extra>" + m.name + "</extra>",
  }));
  Plotly.react("time", traces, layout(300, { xaxis: axis("s"), yaxis: axis("in time", { range: [0, 1.02], tickformat: ".0%" }) }), OPTIONS);
}

const button = document.getElementById("theme");
function theme(name) {
  document.documentElement.dataset.theme = name;
  button.textContent = name === "dark" ? "Light" : "Dark";
  draw();
}
button.addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
