"use strict";
// Rows come as server-sent events ("all", then "change"); what is shown is drawn anew from them, at most four times a second.

const SECTIONS = ["sources", "gpus", "shares", "hours", "services", "models", "jobs", "decisions", "warnings"];
const rows = Object.fromEntries(SECTIONS.map((name) => [name, new Map()]));
const MOST_ROWS = 200; // of a table at once: a thousand rows of which nobody sees more than forty cost too much
const MOST_NAMED = 10; // tenants of one GPU that have a colour of their own
const REDRAW_MS = 250;

const $ = (id) => document.getElementById(id);
const sort = { shares: ["granted", -1], services: ["name", 1], models: ["name", 1], jobs: ["state", 1] };
let shownShares = MOST_ROWS;
let timer = 0;
let drawn = 0;

// ---- formats ----
const DASH = "–";
const percent = (x) => (x == null ? DASH : `${(100 * x).toFixed(x > 0 && x < 0.0995 ? 1 : 0)} %`);
function bytes(n) {
  if (n == null) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < 4) { n /= 1024; unit++; }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}
function seconds(s) {
  if (s == null) return DASH;
  if (s === 0) return "0 s";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}
const ms = (x) => (x == null ? DASH : `${x < 100 ? x.toFixed(1) : Math.round(x)} ms`);
const count = (n) => (n == null ? DASH : Math.round(n).toLocaleString("en-US"));
const rate = (x) => (x == null ? DASH : x < 10 ? x.toFixed(1) : count(x));

// ---- elements; text goes in as text, never as markup ----
function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "style") for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}
// A tenant's colour comes from its name, so it is the same on every page; where another has it already, the one that is
// used least by those who are here. Whoever has a colour keeps it.
const hues = new Map();
// Language models that are on a GPU have a part of its memory, and of its time what they use.
const residents = () => [...rows.models.values()].filter((row) => row.gpu != null).map((row) => ({ tenant: row.key, gpu: row.gpu, memory_bytes: row.memory_bytes }));
function giveColors() {
  const names = new Set([...rows.shares.values(), ...residents()].map((share) => share.tenant));
  const uses = Array(10).fill(0);
  for (const [name, hue] of hues) if (names.has(name)) uses[hue] += 1; else hues.delete(name);
  for (const name of names) if (!hues.has(name)) {
    let hash = 0;
    for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
    let best = hash % 10;
    for (let step = 1; step < 10; step++) if (uses[(hash + step) % 10] < uses[best]) best = (hash + step) % 10;
    hues.set(name, best);
    uses[best] += 1;
  }
}
const colorOf = (name) => `var(--c${hues.get(name) ?? 0})`;
const wanted = () => $("find").value.trim().toLowerCase();
const matches = (...texts) => { const word = wanted(); return !word || texts.some((text) => String(text ?? "").toLowerCase().includes(word)); };

// ---- GPUs ----
function segments(shares, value, total) {
  const track = make("div", { className: "track" });
  for (const share of shares) {
    const part = value(share) / total;
    if (part > 0) track.append(make("i", { title: `${share.tenant}: ${percent(part)}`, style: { width: `${Math.min(100, 100 * part)}%`, "--c": share.color } }));
  }
  return track;
}
function gathered(shares) {
  // the largest are named; their order does not depend on what they got, which changes with each look
  const size = (share) => Math.max(share.granted ?? 0, share.got ?? 0);
  const order = (a, b) => (b.granted ?? 0) - (a.granted ?? 0) || a.tenant.localeCompare(b.tenant);
  const bySize = [...shares].sort((a, b) => size(b) - size(a) || order(a, b));
  const named = shares.length <= MOST_NAMED ? shares.length : MOST_NAMED - 1;
  const sorted = [...bySize.slice(0, named).sort(order), ...bySize.slice(named)];
  const used = new Set();
  for (const share of sorted) {
    let color = colorOf(share.tenant);
    for (let step = 0; used.has(color) && step < 10; step++) color = `var(--c${(parseInt(color.slice(7), 10) + 1) % 10})`;
    used.add(color);
    share.color = color;
  }
  if (sorted.length <= MOST_NAMED) return sorted;
  const rest = { tenant: `${sorted.length - MOST_NAMED + 1} others`, granted: 0, got: 0, memory_bytes: 0, color: "var(--faint)" };
  for (const share of sorted.slice(MOST_NAMED - 1)) {
    rest.granted += share.granted ?? 0;
    rest.got += share.got ?? 0;
    rest.memory_bytes += share.memory_bytes ?? 0;
    share.color = rest.color;
  }
  return [...sorted.slice(0, MOST_NAMED - 1), rest];
}
function drawGpus() {
  giveColors();
  const byGpu = new Map();
  for (const share of [...rows.shares.values(), ...residents()]) (byGpu.get(share.gpu) ?? byGpu.set(share.gpu, []).get(share.gpu)).push(share);
  const cards = [...rows.gpus.values()].sort((a, b) => a.node.localeCompare(b.node) || a.index - b.index).map((gpu) => {
    const all = byGpu.get(gpu.key) ?? [];
    const shares = gathered(all);
    const sum = (field) => all.reduce((total, share) => total + (share[field] ?? 0), 0);
    const line = (name, field, total, text, thin) => make("div", { className: `row${thin ? " thin" : ""}`, role: "img", ariaLabel: `${name}: ${text}` },
      make("span", {}, name), segments(shares, (share) => share[field] ?? 0, total), make("b", {}, text));
    return make("article", { className: "gpu", ariaLabel: `GPU ${gpu.index} of ${gpu.node}` },
      make("h3", {}, `GPU ${gpu.index}`, make("span", {}, gpu.model), make("span", {}, gpu.node)),
      gpu.granted === false ? null : line("granted", "granted", Math.max(1, sum("granted")), percent(sum("granted"))),
      all.some((share) => share.got != null) ? line("got", "got", Math.max(1, sum("got")), percent(Math.min(1, sum("got")))) : null,
      gpu.memory_used_bytes != null ? line("memory", "memory_bytes", gpu.memory_bytes || 1, bytes(gpu.memory_used_bytes), true) : null,
      shares.length ? make("ul", { className: "legend" }, ...shares.map((share) => make("li", { title: share.tenant }, make("i", { style: { "--c": share.color } }), make("span", {}, share.tenant)))) : make("p", { className: "legend" }, "free"));
  });
  // a fleet measures neither time nor memory: a bar of what was given is all, and many GPUs must have room
  $("gpus").classList.toggle("slim", ![...rows.gpus.values()].some((gpu) => gpu.memory_used_bytes != null) && ![...rows.shares.values()].some((share) => share.got != null));
  $("gpus").replaceChildren(...cards);
}

// ---- tables ----
// A column marked `maybe` is left out where no row has it: a fleet measures no memory, a server takes no turns.
function drawTable(name, every, list) {
  const columns = every.filter((each) => !each.hidden?.()).filter((each) => !each.maybe || [...rows[name].values()].some((row) => row[each.key] != null && row[each.key] !== ""));
  const [by, direction] = columns.some((each) => each.key === sort[name][0]) ? sort[name] : [columns[0].key, 1];
  const column = columns.find((each) => each.key === by);
  const value = (row) => (column.value ? column.value(row) : row[column.key]);
  list.sort((a, b) => {
    const x = value(a) ?? "", y = value(b) ?? "";
    return direction * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true })) || String(a.key).localeCompare(String(b.key));
  });
  const table = $(name);
  const focused = document.activeElement?.closest?.(`#${name} th`)?.cellIndex;
  const head = make("tr", {}, ...columns.map((each) => {
    const cell = make("th", { scope: "col", className: `${each.text || each.wide ? "text" : ""} ${each.less ? "less" : ""}` }, make("button", { type: "button", onclick: () => {
      sort[name] = [each.key, by === each.key ? -direction : each.text || each.wide ? 1 : -1];
      draw();
    } }, each.name));
    if (each.key === by) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    return cell;
  }));
  const body = list.slice(0, name === "shares" ? shownShares : MOST_ROWS).map((row) => make("tr", {}, ...columns.map((each) => {
    const shown = each.show ? each.show(row) : row[each.key] ?? DASH;
    return make("td", { className: `${each.wide ? "text" : ""} ${each.less ? "less" : ""}` }, ...(Array.isArray(shown) ? shown : [shown]).filter((part) => part != null));
  })));
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  if (focused != null) table.tHead.rows[0].cells[focused]?.querySelector("button")?.focus({ preventScroll: true });
}
const bar = (part, mark, color) => part == null || Number.isNaN(part) ? null : make("span", { className: "mini", ariaHidden: "true" },
  make("i", { style: { width: `${100 * Math.min(1, part ?? 0)}%`, ...(color ? { "--c": color } : {}) } }),
  mark != null && mark < 1 ? make("u", { style: { left: `calc(${100 * mark}% - 1px)` }, title: "granted" }) : null);
// The last hour of a share: an area of what it got, a line of what it was promised, minutes below the promise marked.
const HOUR = { minutes: 60, width: 120, height: 26, margin: 0.02 }; // margin: as in the agent's rule of what is short
const isShort = (row, minute) => minute != null && minute[1] < minute[0] - Math.min(HOUR.margin, row.granted / 2);
const shortMinutes = (row) => (rows.hours.get(row.key)?.minutes ?? []).filter((minute) => isShort(row, minute)).length;
function hour(row) {
  const minutes = rows.hours.get(row.key)?.minutes;
  if (!minutes?.length) return DASH;
  const known = minutes.filter((minute) => minute != null);
  const top = Math.max(0.05, ...known.flat()), step = HOUR.width / HOUR.minutes, start = HOUR.width - step * minutes.length;
  const y = (part) => (HOUR.height - 1 - (HOUR.height - 2) * (part / top)).toFixed(1);
  let got = "", promised = "", short = "";
  minutes.forEach((minute, n) => {
    if (minute == null) return;
    const x = (start + n * step).toFixed(1), box = `M${x} ${HOUR.height}V${y(minute[1])}h${step}V${HOUR.height}z`;
    got += box;
    if (isShort(row, minute)) short += `M${x} ${y(minute[1])}V${y(minute[0])}h${step}V${y(minute[1])}z`;
    promised += `M${x} ${y(minute[0])}h${step}`;
  });
  const mean = (field) => percent(known.reduce((sum, minute) => sum + minute[field], 0) / known.length);
  const about = `last ${minutes.length} min: promised ${mean(0)}, got ${mean(1)} in the mean, short in ${shortMinutes(row)} min`;
  const SVG = "http://www.w3.org/2000/svg", chart = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ class: "hour", viewBox: `0 0 ${HOUR.width} ${HOUR.height}`, role: "img", "aria-label": about })) chart.setAttribute(name, value);
  chart.style.setProperty("--c", row.color ?? colorOf(row.tenant));
  chart.append(Object.assign(document.createElementNS(SVG, "title"), { textContent: about }));
  for (const [name, path] of [["got", got], ["short", short], ["promised", promised]]) {
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("class", name);
    line.setAttribute("d", path);
    chart.append(line);
  }
  return chart;
}
const figure = (text, kind) => make("span", { className: `figure ${kind ?? ""}` }, text);
const small = (text, kind) => (text ? make("small", { className: kind ?? "" }, text) : null);
const pill = (text, kind) => make("span", { className: `pill ${kind ?? ""}` }, text);

const NOT_ENFORCED = "ShareNotEnforced";
function stateOf(row) {
  if (row.state === NOT_ENFORCED) return [NOT_ENFORCED, "bad"];
  if (row.residency && row.residency !== "resident") return [row.residency, "wait"];
  if (row.floor) return row.floor === "holds" ? ["holds off", "go"] : [row.floor, "wait"];
  if (row.holding) return ["on the GPU", "go"];
  if (row.waiting) return ["waiting", "wait"];
  return [row.state ?? "", { running: "go", serving: "go", parked: "wait", starting: "wait", failed: "bad" }[row.state]];
}
const SHARES = [
  { key: "tenant", name: "who", text: true, show: (row) => [make("i", { className: "dot", style: { "--c": row.color ?? colorOf(row.tenant) } }), ` ${row.tenant}`, small(row.note), small(row.class)] },
  { key: "gpu", name: "GPU", value: (row) => gpuName(row.gpu), show: (row) => gpuName(row.gpu) },
  { key: "state", name: "state", value: (row) => stateOf(row)[0], show: (row) => pill(...stateOf(row)) },
  { key: "granted", name: "granted", show: (row) => percent(row.granted) },
  { key: "got", name: "got", maybe: true, show: (row) => [bar(row.got, row.granted, row.color), figure(percent(row.got)), row.short_s && Math.round(100 * row.got) < Math.round(100 * row.granted) ? small(`short for ${seconds(row.short_s)}`, "bad") : null] },
  { key: "hour", name: "last hour", hidden: () => !rows.hours.size, value: shortMinutes, show: hour },
  { key: "limit", name: "limit", show: (row) => percent(row.limit) },
  { key: "sms", name: "SMs", maybe: true, show: (row) => row.sms ?? DASH },
  { key: "memory_bytes", name: "memory", maybe: true, show: (row) => [figure(`${bytes(row.memory_bytes)}${row.memory_limit_bytes ? ` / ${bytes(row.memory_limit_bytes)}` : ""}`), row.memory_by ? small(`limited by the ${row.memory_by}`) : null] },
  { key: "waited_s", name: "waited", maybe: true, show: (row) => seconds(row.waited_s) },
  { key: "turns", name: "turns", maybe: true, less: true, show: (row) => count(row.turns) },
  { key: "mechanism", name: "by", less: true, show: (row) => row.mechanism ?? DASH },
];
const inTime = (part) => (part == null ? "" : part < 0.99 ? "bad" : "good");
const SERVICES = [
  { key: "name", name: "service", text: true, value: (row) => row.key, show: (row) => [row.key, row.state && row.state !== "ready" ? small(row.state, "bad") : null] },
  { key: "rate_rps", name: "requests/s", show: (row) => rate(row.rate_rps) },
  { key: "attainment", name: "in time", show: (row) => make("span", { className: inTime(row.attainment) }, row.attainment == null ? DASH : `${(100 * row.attainment).toFixed(2)} %`) },
  { key: "p99_ms", name: "p99 of SLO", show: (row) => [row.p99_ms == null ? null : bar(row.p99_ms / row.slo_ms, null, row.p99_ms > row.slo_ms ? "var(--bad)" : "var(--good)"), figure(`${ms(row.p99_ms)} / ${ms(row.slo_ms)}`, "pair")] },
  { key: "p50_ms", name: "p50", show: (row) => ms(row.p50_ms) },
  { key: "dropped", name: "dropped", show: (row) => count(row.dropped) },
  { key: "failed", name: "failed", show: (row) => count(row.failed) },
  { key: "queue", name: "queue", show: (row) => count(row.queue) },
  { key: "places", name: "on", wide: true, show: (row) => row.places || DASH },
];
const MODEL_KIND = { resident: "go", starting: "wait", draining: "wait", leaving: "wait", "coming back": "wait" };
const ofSlo = (value, slo) => [value == null ? null : bar(value / slo, null, value > slo ? "var(--bad)" : "var(--good)"), figure(`${ms(value)} / ${ms(slo)}`, "pair")];
const MODELS = [
  { key: "name", name: "model", text: true, value: (row) => row.key, show: (row) => [row.key, row.fault ? small(row.fault, "bad") : null] },
  { key: "state", name: "state", show: (row) => pill(row.state, MODEL_KIND[row.state]) },
  { key: "gpu", name: "GPU", value: (row) => gpuName(row.gpu), show: (row) => gpuName(row.gpu) },
  { key: "memory_bytes", name: "memory", less: true, show: (row) => bytes(row.memory_bytes || null) },
  { key: "queue", name: "queue", show: (row) => count(row.queue) },
  { key: "open", name: "open", show: (row) => count(row.open) },
  { key: "ttft_p99_ms", name: "TTFT p99 of SLO", show: (row) => ofSlo(row.ttft_p99_ms, row.ttft_slo_ms) },
  { key: "tpot_ms", name: "TPOT p50 of SLO", show: (row) => ofSlo(row.tpot_ms, row.tpot_slo_ms) },
  { key: "attainment", name: "in time", show: (row) => make("span", { className: inTime(row.attainment) }, row.attainment == null ? DASH : `${(100 * row.attainment).toFixed(1)} %`) },
  { key: "answer_p99_ms", name: "whole p99", less: true, show: (row) => ms(row.answer_p99_ms) },
  { key: "switches", name: "switches", show: (row) => `${count(row.switches)}, ${seconds(row.switch_s)}` },
  { key: "failed", name: "failed", less: true, show: (row) => count(row.failed) },
];
const JOB_ORDER = { running: 0, starting: 1, waiting: 2, queued: 2 };
const JOB_KIND = { running: "go", failed: "bad", waiting: "wait", queued: "wait" };
const JOBS = [
  { key: "name", name: "job", text: true, show: (row) => [row.name ?? row.key, row.name && row.name !== row.key ? small(row.key) : null, small(row.reason, "phone")] },
  { key: "state", name: "state", value: (row) => JOB_ORDER[row.state] ?? 3, show: (row) => pill(row.state ?? "", JOB_KIND[row.state]) },
  { key: "gpus", name: "GPUs", show: (row) => row.gpus ?? DASH },
  { key: "progress", name: "done", show: (row) => (row.progress == null ? DASH : [bar(row.progress), figure(percent(row.progress))]) },
  { key: "waited_s", name: "waited", show: (row) => seconds(row.waited_s) },
  { key: "ran_s", name: "ran", show: (row) => seconds(row.ran_s) },
  { key: "place", name: "on", wide: true, show: (row) => row.place || DASH },
  { key: "reason", name: "why", wide: true, less: true, show: (row) => row.reason || DASH },
];
function gpuName(key) {
  const gpu = rows.gpus.get(key);
  if (!gpu) return key ?? DASH;
  return new Set([...rows.gpus.values()].map((each) => each.node)).size > 1 ? `${gpu.node}:${gpu.index}` : String(gpu.index);
}

// ---- the page ----
function drawTotals() {
  const shares = [...rows.shares.values()], gpus = [...rows.gpus.values()], services = [...rows.services.values()], jobs = [...rows.jobs.values()];
  const total = (list, field) => list.reduce((sum, row) => sum + (row[field] ?? 0), 0);
  const tiles = [];
  const measured = shares.filter((share) => share.got != null), told = gpus.filter((gpu) => gpu.memory_used_bytes != null), granted = gpus.filter((gpu) => gpu.granted !== false);
  if (gpus.length) tiles.push(["GPUs", count(gpus.length)]);
  if (granted.length && measured.length) {
    const got = new Map(); // of each GPU: beside a kernel that hangs, several tenants have it at the same time
    for (const share of measured) got.set(share.gpu, (got.get(share.gpu) ?? 0) + share.got);
    tiles.push(["GPU time in use", percent([...got.values()].reduce((sum, part) => sum + Math.min(1, part), 0) / granted.length)]);
  } else if (granted.length) tiles.push(["GPUs given away", percent(total(shares, "granted") / granted.length)]);
  if (told.length) tiles.push(["memory in use", percent(total(told, "memory_used_bytes") / (total(told, "memory_bytes") || 1))]);
  const tenants = shares.filter((share) => share.kind == null || share.kind === "tenant");
  if (tenants.length) tiles.push(["tenants", count(new Set(tenants.map((share) => share.tenant)).size)], ["waiting for a turn", count(tenants.filter((share) => share.waiting).length)]);
  if (services.length) {
    const whole = services.filter((row) => row.part_of == null); // a stage's requests are its application's
    const asked = whole.reduce((sum, row) => sum + (row.rate_rps ?? 0), 0);
    const met = whole.reduce((sum, row) => sum + (row.rate_rps ?? 0) * (row.attainment ?? 1), 0);
    tiles.push(["requests/s", rate(asked)], ["in time", asked ? percent(met / asked) : DASH]);
  }
  if (jobs.length || [...rows.sources.values()].some((source) => source.kind === "fleet")) tiles.push(["jobs running", count(jobs.filter((job) => job.state === "running").length)], ["jobs waiting", count(jobs.filter((job) => job.state === "waiting" || job.state === "queued").length)]);
  $("totals").replaceChildren(...tiles.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
function drawDecisions() {
  const now = Date.now() / 1000;
  const list = [...rows.decisions.values()].sort((a, b) => b.time_s - a.time_s).slice(0, 30);
  $("decisions").replaceChildren(...list.map((row) => make("li", {}, make("time", { dateTime: new Date(1000 * row.time_s).toISOString() }, `${seconds(Math.max(0, now - row.time_s))} ago`), make("span", {}, row.text))));
}
function drawWarnings() {
  const list = [...rows.warnings.values()].map((row) => `${row.about}: ${row.text}`);
  for (const source of rows.sources.values()) {
    if (source.ok === false) list.unshift(`${source.name}: not reached${source.note ? `: ${source.note}` : ""}`);
    else if (source.note) list.unshift(`${source.name}: ${source.note}`);
  }
  $("warn").hidden = !list.length;
  $("warn").replaceChildren(...list.slice(0, 8).map((text) => make("p", {}, text)), list.length > 8 ? make("p", {}, `and ${list.length - 8} more`) : "");
}
const FIRST = {
  agent: ["shares", "No tenants yet: cotenant run --request 30% -- python train.py"],
  fleet: ["jobs", "No jobs yet: cotenant submit -- python train.py"],
  models: ["models", "No models yet: name some in the file that cotenant serve reads"],
  server: ["services", "No services yet: name some in the file that cotenant serve reads"],
};
function drawEmpty() {
  const kinds = new Set([...rows.sources.values()].filter((source) => source.ok !== false).map((source) => source.kind));
  const hints = [...kinds].filter((kind) => FIRST[kind] && !rows[FIRST[kind][0]].size).map((kind) => FIRST[kind][1]);
  $("empty").hidden = !hints.length;
  $("empty").replaceChildren(...hints.map((text) => make("span", {}, text)));
}
function draw() {
  drawn = performance.now();
  timer = 0;
  $("where").textContent = [...rows.sources.values()].map((source) => source.name).join(", ");
  drawTotals();
  drawWarnings();
  drawGpus();
  const shares = [...rows.shares.values()].filter((row) => matches(row.tenant, row.state, gpuName(row.gpu)));
  const services = [...rows.services.values()].filter((row) => matches(row.key, row.places));
  const models = [...rows.models.values()].filter((row) => matches(row.key, row.state, gpuName(row.gpu)));
  const jobs = [...rows.jobs.values()].filter((row) => matches(row.key, row.name, row.state, row.reason, row.place));
  drawTable("shares", SHARES, shares);
  drawTable("services", SERVICES, services);
  drawTable("models", MODELS, models);
  drawTable("jobs", JOBS, jobs);
  const more = shares.length - shownShares;
  $("shares-more").replaceChildren(...(more > 0 ? [`${count(shownShares)} of ${count(shares.length)} shown `, make("button", { type: "button", onclick: () => { shownShares += MOST_ROWS; draw(); } }, "Show more")] : []));
  drawDecisions();
  for (const name of ["gpus", "shares", "services", "models", "jobs", "decisions"]) $(`${name}-at`).hidden = !rows[name].size;
  drawEmpty();
}
function soon() {
  if (!timer) timer = setTimeout(draw, Math.max(0, REDRAW_MS - (performance.now() - drawn)));
}
function take(sections) {
  for (const name of SECTIONS) for (const row of sections[name] ?? []) rows[name].set(row.key, row);
}
function link(state, text) {
  $("link").className = state;
  $("link").lastElementChild.textContent = text;
}
function listen() {
  const source = new EventSource(`/events${location.search}`);
  source.addEventListener("all", (event) => {
    for (const name of SECTIONS) rows[name].clear();
    take(JSON.parse(event.data));
    link("on", "live");
    soon();
  });
  source.addEventListener("change", (event) => {
    const { set, gone } = JSON.parse(event.data);
    for (const [name, keys] of Object.entries(gone)) for (const key of keys) rows[name].delete(key);
    take(set);
    soon();
  });
  source.onerror = () => {
    link("off", "not connected, trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

const stored = localStorage.getItem("cotenant-theme");
const theme = (name) => document.documentElement.setAttribute("data-theme", name);
theme(stored ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => {
  const next = document.documentElement.getAttribute("data-theme") === "dark" ? "light" : "dark";
  theme(next);
  localStorage.setItem("cotenant-theme", next);
};
$("find").oninput = () => { shownShares = MOST_ROWS; draw(); };
addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== $("find")) { event.preventDefault(); $("find").focus(); }
  if (event.key === "Escape" && document.activeElement === $("find")) { $("find").value = ""; draw(); }
});
setInterval(drawDecisions, 5000); // the ages
listen();
