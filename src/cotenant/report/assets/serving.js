"use strict";
// Charts of a serving run, drawn anew when the theme changes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => css(`--c${i % 10}`);

function layout(height, more) {
  return {
    height, margin: { l: 64, r: 16, t: 8, b: 48 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 13, color: css("--ink") }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, ...more,
  };
}
// a narrow window stacks the legend, a row each, over the chart
const legendRows = () => (innerWidth < 600 ? 20 * DATA.services.length : 24);
const axis = (title, more) => ({ title: { text: title }, gridcolor: css("--grid"), zerolinecolor: css("--line"), automargin: true, ...more });
const OPTIONS = { displayModeBar: false, responsive: true };
// a line needs two neighbouring windows with requests; a window without such a neighbour is drawn as a marker
const lone = (y) => y.map((v, i) => (v != null && y[i - 1] == null && y[i + 1] == null ? 8 : 0));

const busyText = (x) => `busy ${(x.busy * 100).toFixed(0)} %, cycle ${x.duty_ms.toFixed(1)} ms`;

// a bar is labelled with what it has room for at a size that can be read; the list below the bars says everything
function fitting(x) {
  const room = ((Math.min(innerWidth, 1380) - 150) * x.percent) / 100;
  const whole = [`${x.label}: ${x.seats.join(", ")}`, busyText(x)];
  if (Math.max(...whole.map((line) => line.length)) * 6.8 < room) return whole.join("<br>");
  return x.label.length * 7.5 < room ? x.label : "";
}

function listLets() {
  document.getElementById("lets").replaceChildren(...DATA.gpulets.map((x, i) => {
    const row = document.createElement("li"), swatch = document.createElement("i"), text = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.setProperty("--swatch", `var(--c${i % 10})`);
    text.textContent = `GPU ${x.gpu}, ${x.label}: ${x.seats.join(", ")}; ${busyText(x)}`;
    row.append(swatch, text);
    return row;
  }));
}

function drawPlan() {
  const lets = DATA.gpulets;
  document.getElementById("plan-part").hidden = !lets.length; // a load test does not know the plan
  if (!lets.length) return;
  const gpus = [...new Set(lets.map((x) => x.gpu))];
  const traces = lets.map((x, i) => ({
    type: "bar", orientation: "h", y: [`GPU ${x.gpu}`], x: [x.percent], showlegend: false,
    marker: { color: color(i), line: { color: css("--surface"), width: 2 } },
    text: [fitting(x)], textangle: 0, constraintext: "none", textposition: "inside", insidetextanchor: "middle", hoverinfo: "text", hovertext: x.seats.join("<br>"),
    textfont: { color: "#fff", size: 12 },
  }));
  Plotly.react("plan", traces, layout(80 + 58 * gpus.length, {
    barmode: "stack", xaxis: axis("% of the GPU's SMs", { range: [0, 100] }), yaxis: axis("", { autorange: "reversed" }),
  }), OPTIONS);
}

// a distribution rises from 0, so that one of a single value has a line, too
const rising = (values, first) => (values.length ? [first, ...values] : []);

function drawLatency() {
  const traces = DATA.services.map((s, i) => ({
    type: "scatter", mode: "lines", name: s.name, line: { color: color(i), shape: "hv" },
    x: rising(s.latency_ms, s.latency_ms[0]).map((ms) => (s.slo_ms ? ms / s.slo_ms : ms)), y: rising(s.share, 0),
    customdata: rising(s.latency_ms, s.latency_ms[0]),
    hovertemplate: "%{customdata:.1f} ms: %{y:.2%}<extra>" + s.name + "</extra>",
  }));
  Plotly.react("latency", traces, layout(360 + legendRows(), {
    xaxis: axis("latency / SLO", { rangemode: "tozero" }), yaxis: axis("share of requests", { range: [0, 1.01], tickformat: ".0%" }),
    shapes: [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: css("--faint"), dash: "dot" } }],
  }), OPTIONS);
}

function drawTime() {
  const traces = DATA.services.map((s, i) => ({
    type: "scatter", mode: "lines+markers", name: s.name, line: { color: color(i) }, x: DATA.windows_s, y: s.attainment,
    marker: { size: lone(s.attainment), opacity: 1, line: { width: 0 } }, cliponaxis: false,
    hovertemplate: "%{x:.0f} s: %{y:.2%}<extra>" + s.name + "</extra>",
  }));
  // from the worst window to all: what lies below says nothing, and one that is always in time must not float in the middle
  const worst = Math.min(1, ...DATA.services.flatMap((s) => s.attainment.filter((x) => x != null)));
  const room = Math.max(0.005, (1 - worst) * 0.06);
  Plotly.react("time", traces, layout(320 + legendRows(), {
    xaxis: axis("s"), yaxis: axis("in time", { tickformat: ".2~%", range: [Math.max(0, worst - room), 1 + room] }),
  }), OPTIONS);
}

function draw() {
  drawPlan();
  drawLatency();
  drawTime();
}

listLets();
let drawnAt = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnAt) return;
  drawnAt = innerWidth;
  draw();
});
const button = document.getElementById("theme");
function theme(name) {
  document.documentElement.dataset.theme = name;
  button.textContent = name === "dark" ? "Light" : "Dark";
  draw();
}
button.addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
