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

function drawDistribution(id) {
  const traces = DATA.models.map((m, i) => ({
    type: "scatter", mode: "lines", name: m.name, line: { color: color(i), shape: "hv" }, x: m[id].x, y: m[id].y,
    hovertemplate: "%{x:.1f} ms: %{y:.2%}<extra>" + m.name + "</extra>",
  }));
  const shapes = DATA.models.flatMap((m, i) => (m[id].promise === null ? [] : [{
    type: "line", x0: m[id].promise, x1: m[id].promise, y0: 0, y1: 1, yref: "paper", line: { color: color(i), dash: "dot", width: 1 },
  }]));
  Plotly.react(id, traces, layout(320, { shapes, xaxis: axis("ms", { rangemode: "tozero" }), yaxis: axis("share", { range: [0, 1.02], tickformat: ".0%" }) }), OPTIONS);
}

function draw() {
  drawDistribution("ttft");
  drawDistribution("tpot");
  const traces = DATA.models.map((m, i) => ({
    type: "scatter", mode: "lines", name: m.name, line: { color: color(i) }, x: DATA.windows_s, y: m.attainment,
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
