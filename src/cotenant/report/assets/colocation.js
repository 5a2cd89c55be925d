"use strict";
// Draws the figures of a co-location page in the colours of the theme.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw() {
  JSON.parse(document.getElementById("data").textContent).forEach(({ data, layout }, i) => {
    const narrow = innerWidth < 600;
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line") };
    Plotly.react(`figure${i}`, data, {
      ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--font"), color: css("--ink"), size: narrow ? 11 : 13 },
      title: { ...layout.title, font: { size: narrow ? 13 : 17 } }, margin: { l: 56, r: 16, t: 56, b: 56 },
      legend: narrow ? { orientation: "h", x: 0, y: -0.25, yanchor: "top" } : {},
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    }, { displayModeBar: false, responsive: true });
  });
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let drawnAt = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnAt) return;
  drawnAt = innerWidth;
  draw();
});
