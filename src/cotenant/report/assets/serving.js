"use strict";
// Charts of a serving run, drawn anew when the theme changes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => css(`--c${i % 10}`);

function layout(height, more) {
  return {
    height, margin: { l: 64, r: 16, t: 8, b: 48 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 13, color: css("--ink") }, legend: { orientation: "h", y: -0.22 }, ...more,
  };
}
const axis = (title, more) => ({ title: { text: title }, gridcolor: css("--grid"), zerolinecolor: css("--line"), automargin: true, ...more });
const OPTIONS = { displayModeBar: false, responsive: true };

function drawPlan() {
  const lets = DATA.gpulets;
  const gpus = [...new Set(lets.map((x) => x.gpu))];
  const traces = lets.map((x, i) => ({
    type: "bar", orientation: "h", y: [`GPU ${x.gpu}`], x: [x.percent], showlegend: false,
    marker: { color: color(i), line: { color: css("--surface"), width: 2 } },
    text: [`${x.label}: ${x.seats.join(", ")}<br>busy ${(x.busy * 100).toFixed(0)} %, cycle ${x.duty_ms.toFixed(1)} ms`],
    textposition: "inside", insidetextanchor: "middle", hoverinfo: "text", hovertext: x.seats.join("<br>"),
    textfont: { color: "#fff", size: 12 },
  }));
  Plotly.react("plan", traces, layout(80 + 58 * gpus.length, {
    barmode: "stack", xaxis: axis("% of the GPU's SMs", { range: [0, 100] }), yaxis: axis("", { autorange: "reversed" }),
  }), OPTIONS);
}

function drawLatency() {
  const traces = DATA.services.map((s, i) => ({
    type: "scatter", mode: "lines", name: s.name, line: { color: color(i), shape: "hv" },
    x: s.latency_ms.map((ms) => ms / s.slo_ms), y: s.share, customdata: s.latency_ms,
    hovertemplate: "%{customdata:.1f} ms: %{y:.2%}<extra>" + s.name + "</extra>",
  }));
  Plotly.react("latency", traces, layout(380, {
    xaxis: axis("latency / SLO", { rangemode: "tozero" }), yaxis: axis("share of requests", { range: [0, 1.01], tickformat: ".0%" }),
    shapes: [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: css("--faint"), dash: "dot" } }],
  }), OPTIONS);
}

function drawTime() {
  const traces = DATA.services.map((s, i) => ({
    type: "scatter", mode: "lines", name: s.name, line: { color: color(i) }, x: DATA.windows_s, y: s.attainment,
    hovertemplate: "%{x:.0f} s: %{y:.2%}<extra>" + s.name + "</extra>",
  }));
  Plotly.react("time", traces, layout(340, {
    xaxis: axis("s"), yaxis: axis("in time", { tickformat: ".0%", rangemode: "normal" }),
  }), OPTIONS);
}

function draw() {
  drawPlan();
  drawLatency();
  drawTime();
}

const button = document.getElementById("theme");
function theme(name) {
  document.documentElement.dataset.theme = name;
  button.textContent = name === "dark" ? "Light" : "Dark";
  draw();
}
button.addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
