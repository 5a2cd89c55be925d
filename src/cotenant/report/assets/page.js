"use strict";
// Builds the cards and controls, draws what is in view, and redraws on every change.

const cards = new Map(); // chart name -> { card, plot, visible, dirty }
const HEIGHT = () => (innerWidth < 600 ? 260 : 310);

function text(value) {
  return typeof value === "function" ? value() : value;
}

function element(tag, className, content) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (content !== undefined) node.textContent = content;
  return node;
}

function segment(label, options, current, choose) {
  const outer = element("div", "segment");
  if (label) outer.append(element("span", "", label));
  if (options.map(([, name]) => name).join("  ").length > 90) {
    const select = element("select");
    select.setAttribute("aria-label", label);
    for (const [value, name] of options) select.append(new Option(name, value, false, value === current));
    select.onchange = () => choose(select.value);
    outer.append(select);
    return outer;
  }
  const box = element("div");
  for (const [value, name] of options) {
    const button = element("button", "", name);
    button.type = "button";
    button.title = name;
    button.setAttribute("aria-pressed", String(value === current));
    button.onclick = () => {
      for (const other of box.children) other.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", "true");
      choose(value);
    };
    box.append(button);
  }
  outer.append(box);
  return outer;
}

function makeCard(name) {
  const chart = CHARTS[name];
  const card = element("article", "card");
  const head = element("div", "card-head");
  const title = element("h3", "", text(chart.title));
  const save = element("button", "save", "save as PNG");
  save.type = "button";
  save.onclick = () => savePng(name);
  head.append(title, save);
  const how = element("p", "", text(chart.how));
  const plot = element("div", "plot");
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", text(chart.title));
  plot.style.minHeight = `${HEIGHT()}px`;
  card.append(head, how);
  if (chart.control) card.append(groupControl());
  card.append(plot);
  cards.set(name, { card, title, how, plot, visible: false, dirty: true });
  return card;
}

function groupControl() {
  const found = Object.keys(GROUP_NAMES).filter((key) => DATA.runs.some((run) => run.groups[key]));
  state.groups = found.includes("class") ? "class" : found[0];
  if (found.length < 2) return "";
  return segment("by", found.map((key) => [key, GROUP_NAMES[key]]), state.groups, (key) => {
    state.groups = key;
    redraw("groups");
  });
}

function figure(name) {
  const chart = CHARTS[name];
  const { traces, layout, height } = chart.draw(shownRuns());
  return { traces, layout: { ...baseLayout(layout), height: height || HEIGHT() }, empty: !traces.some((t) => t.x && t.x.length) };
}

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };

function draw(name) {
  const entry = cards.get(name);
  entry.dirty = false;
  entry.title.textContent = text(CHARTS[name].title);
  entry.how.textContent = text(CHARTS[name].how);
  const { traces, layout, empty } = figure(name);
  if (empty) {
    Plotly.purge(entry.plot);
    entry.plot.replaceChildren(element("div", "none", "Nothing to show for the runs chosen."));
    return;
  }
  entry.plot.querySelector(".none")?.remove();
  Plotly.react(entry.plot, traces, layout, CONFIG);
}

// Charts out of view are drawn one at a time while the browser is idle, so that a long page is whole soon after it opens.
const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 20));
let resting = false;

function drawRest() {
  const next = [...cards].find(([, entry]) => entry.dirty);
  if (resting || !next) return;
  resting = true;
  whenIdle(() => {
    resting = false;
    if (next[1].dirty) draw(next[0]);
    drawRest();
  }, { timeout: 200 });
}

function redraw(only) {
  for (const [name, entry] of cards) {
    if (only && name !== only) continue;
    entry.dirty = true;
    if (entry.visible) draw(name);
  }
  drawRest();
}

const conditions = (name) => DATA.facets.filter((f) => DATA.byPolicy && !(name === "sweep" && (f.key === state.sweepX || f.key === "seed"))).map((f) => `${f.name} ${state.facet[f.key]}`).join(", ");

// a saved picture carries its own legend, title and background: it will stand alone on a slide
function savePng(name) {
  const { traces, layout } = figure(name);
  const full = {
    ...layout, width: 1100, height: 620, showlegend: true, paper_bgcolor: css("--surface"), margin: { ...layout.margin, t: 80, l: 70, r: 30 },
    title: { text: text(CHARTS[name].title), subtitle: { text: conditions(name), font: { size: 14, color: css("--soft") } }, x: 0.02, xanchor: "left", font: { size: 20 } }, legend: { orientation: "h", y: -0.18 },
  };
  Plotly.downloadImage({ data: traces, layout: full, config: {} }, { format: "png", scale: 2, width: 1100, height: 620, filename: `cotenant-${name}` });
}

// ---- the bar of facets and chips

function buildBar() {
  const facets = document.getElementById("facets");
  if (DATA.byPolicy) {
    for (const facet of DATA.facets) {
      facets.append(segment(facet.name, facet.values.map((v) => [v, v]), state.facet[facet.key], (value) => {
        state.facet[facet.key] = value;
        update();
      }));
    }
  }
  const chips = document.getElementById("chips");
  const names = DATA.byPolicy ? DATA.policies : DATA.runs.map((run) => run.label);
  for (const name of names) {
    const run = DATA.runs.find((r) => chipOf(r) === name);
    const chip = element("button", "chip");
    chip.type = "button";
    chip.title = "Click to hide or show, double-click to show only this one";
    chip.dataset.color = run.color % COLORS;
    chip.setAttribute("aria-pressed", "true");
    chip.append(element("i", "swatch"), document.createTextNode(name));
    chip.onclick = (event) => (event.detail === 2 ? isolate(name, names) : toggle(name, names));
    chips.append(chip);
  }
}

let hiddenBefore = new Set(); // before the first click of what may become a double click

function toggle(name, names) {
  hiddenBefore = new Set(state.hidden);
  if (state.hidden.has(name)) state.hidden.delete(name);
  else state.hidden.add(name);
  if (state.hidden.size === names.length) state.hidden = new Set(); // hiding the last one shows all
  update();
}

function isolate(name, names) {
  const alone = names.every((other) => (other === name) !== hiddenBefore.has(other));
  state.hidden = new Set(alone ? [] : names.filter((other) => other !== name));
  update();
}

function paintSwatches() {
  for (const chip of document.querySelectorAll(".chip")) {
    chip.style.setProperty("--swatch", `var(--c${chip.dataset.color})`);
    chip.setAttribute("aria-pressed", String(!state.hidden.has(chip.textContent)));
  }
  for (const row of document.querySelectorAll("#runs tbody tr")) {
    row.style.setProperty("--swatch", `var(--c${DATA.runs[row.dataset.run].color % COLORS})`);
  }
}

// ---- the four figures on top, and the table

function updateTiles() {
  for (const tile of document.querySelectorAll(".tile")) {
    const { key, unit, better } = tile.dataset;
    const known = shownRuns().map((run) => [lookup(run.summary, key), run]).filter(([value]) => value !== null);
    const [value, run] = known.length ? known.reduce((a, b) => ((better === "lower" ? b[0] < a[0] : b[0] > a[0]) ? b : a)) : [null, null];
    tile.querySelector(".tile-value").textContent = FORMATS[unit](value);
    tile.querySelector(".tile-run").textContent = run ? nameOf(run) : "";
  }
}

function updateTable() {
  const shown = new Set(shownRuns().map((run) => DATA.runs.indexOf(run)));
  const rows = [...document.querySelectorAll("#runs tbody tr")];
  for (const row of rows) row.hidden = !shown.has(Number(row.dataset.run));
  const heads = [...document.querySelectorAll("#runs thead tr.heads th")];
  heads.forEach((head, column) => {
    const cells = rows.filter((row) => !row.hidden).map((row) => row.cells[column]).filter((cell) => cell.dataset.v !== undefined);
    const values = cells.map((cell) => Number(cell.dataset.v));
    const better = head.dataset.better;
    const best = better === "lower" ? Math.min(...values) : Math.max(...values);
    const mark = cells.find((cell) => Number(cell.dataset.v) === best)?.textContent;
    const differ = new Set(cells.map((cell) => cell.textContent)).size > 1;
    for (const cell of cells) {
      cell.classList.toggle("best", better !== "neither" && differ && cell.textContent === mark);
      const top = Math.max(...values);
      if (cell.classList.contains("bar-cell")) cell.style.setProperty("--w", `${top > 0 ? (100 * Number(cell.dataset.v)) / top : 0}%`);
    }
  });
}

function sortBy(column, head) {
  const body = document.querySelector("#runs tbody");
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of document.querySelectorAll("#runs thead tr.heads th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => (column === 0 ? row.cells[0].textContent : Number(row.cells[column].dataset.v ?? Infinity));
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  body.append(...rows);
}

// ---- theme and start

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  redraw();
}

function update() {
  paintSwatches();
  updateTiles();
  updateTable();
  redraw();
}

function buildSweep() {
  const xs = DATA.facets.filter((f) => f.key !== "seed" && f.values.length > 1);
  if (!xs.length) return;
  state.sweepX = (xs.find((f) => f.key === "load") || xs.find((f) => f.key === "rate") || xs[0]).key;
  document.getElementById("s-sweep").hidden = false;
  if (xs.length > 1) document.getElementById("sweep-x").append(segment("against", xs.map((f) => [f.key, f.name]), state.sweepX, (key) => { state.sweepX = key; redraw("sweep"); }));
  document.getElementById("sweep-y").append(segment("", SWEEP_Y.map(([key, name]) => [key, name]), state.sweepY, (key) => { state.sweepY = key; redraw("sweep"); }));
}

function start() {
  buildSweep();
  for (const grid of document.querySelectorAll("[data-charts]")) {
    if (grid.closest("[hidden]")) continue;
    const names = grid.dataset.charts.split(" ").filter((name) => !CHARTS[name].when || CHARTS[name].when());
    const made = names.map(makeCard);
    // an odd card out fills its row
    if (!grid.classList.contains("three") && !grid.classList.contains("one") && made.length % 2) made.at(-1).classList.add("wide");
    grid.append(...made);
  }
  buildBar();
  if (DATA.byPolicy) for (const node of document.querySelectorAll(".cond")) node.classList.add("known");
  document.querySelectorAll("#runs thead tr.heads th").forEach((head, column) => { head.querySelector("button").onclick = () => sortBy(column, head); });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  document.getElementById("theme").textContent = dark.matches ? "Light" : "Dark";
  for (const entry of cards.values()) entry.visible = entry.card.getBoundingClientRect().top < innerHeight;
  update();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const found = [...cards].find(([, c]) => c.card === entry.target);
      found[1].visible = entry.isIntersecting;
      if (entry.isIntersecting && found[1].dirty) draw(found[0]);
    }
  }, { rootMargin: "400px 0px" });
  for (const { card } of cards.values()) seen.observe(card);
  addEventListener("beforeprint", () => { for (const name of cards.keys()) draw(name); });
}

start();
