// Texts of the run enter the page as text nodes. The timeline is SVG, whose texts the server has escaped.
const POLL = 2000, KEPT = 3000, SMOOTH_FROM = 80, SECONDS = "seconds per step";
const token = new URLSearchParams(location.search).get("token") ?? "";
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

async function ask(path, query = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams({ ...query, token })}`).catch(() => {
    throw new Error("realrl watch does not answer");
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${Number(value.toPrecision(3))} s`;
}
function duration(value) {
  value = Math.max(0, value);
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${value.toFixed(0)} s`;
  const minutes = Math.round(value / 60), hours = Math.floor(minutes / 60);
  if (hours < 1) return `${minutes} min`;
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 999.5 && unit < 4) { value /= 1024; unit += 1; }
  return `${unit ? Number(value.toPrecision(3)) : value} ${units[unit]}`;
}
function clock(time) {
  const date = new Date(time * 1000), today = new Date().toDateString() === date.toDateString();
  return today ? date.toLocaleTimeString() : date.toLocaleString();
}

const charts = new Map(), known = new Set();
let offset = 0, file = null, reading = 0;

function addChart(metric, label) {
  const chart = new Chart(metric, label);
  charts.set(metric, chart);
  byId("charts").append(chart.element);
}

function restart() {
  offset = 0;
  reading += 1;
  for (const chart of charts.values()) chart.clear();
}

// A new reader stops an earlier one, because the charts may have changed.
async function pollMetrics() {
  let mine = reading += 1;
  const names = [...charts.keys()].filter((name) => name !== SECONDS);
  for (let more = true; more;) {
    const found = await ask("/api/metrics", { offset, names: names.join(",") });
    if (mine !== reading) return;
    if (file !== null && (found.file !== file || found.offset < offset)) {
      file = found.file;
      restart();
      mine = reading;
      continue;
    }
    file = found.file;
    for (const [step, kind, took, values] of found.rows) {
      const curve = kind === "eval" ? "eval" : "train";
      if (curve === "train") charts.get(SECONDS).train.add(step, took);
      values.forEach((value, i) => { if (names[i]) charts.get(names[i])[curve].add(step, value); });
    }
    offset = found.offset;
    more = found.more;
    listNames(found.known);
    for (const chart of charts.values()) chart.draw();
  }
}

function listNames(names) {
  const shown = [...charts.keys()];
  for (const name of names) {
    if (known.has(name) || known.size >= 400 || shown.some((s) => s === name || name.endsWith(`/${s}`))) continue;
    known.add(name);
    const box = make("input", { type: "checkbox" });
    box.addEventListener("change", () => {
      if (box.checked) addChart(name, name);
      else { charts.get(name).element.remove(); charts.delete(name); }
      restart();
      refresh();
    });
    byId("names").append(make("label", {}, box, make("span", { textContent: name })));
  }
}

function figure(name, value, unit, note) {
  return make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }, make("small", { textContent: unit })),
    make("dd", { className: "note", textContent: note }));
}

function percent(share) { return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`; }

function speedFigure(speed) {
  const ranks = Object.entries(speed).filter(([name]) => name.startsWith("idle/rank-"));
  const idlest = ranks.find(([, share]) => share === speed.idle_max)?.[0].replace("idle/rank-", "rank ") ?? "the most idle rank";
  const note = [
    "mfu" in speed ? `MFU ${percent(speed.mfu)}` : "",
    "idle_max" in speed ? `ranks idle ${percent(speed.idle)} of the time, ${idlest} ${percent(speed.idle_max)}` : "",
  ].filter(Boolean).join("; ");
  return figure("Speed", Math.round(speed.tokens_per_s).toLocaleString("en"), "tokens/s", note);
}

function split(text) { return text.includes(" ") && !/ .* /.test(text) ? text.split(" ") : [text, ""]; }

function showStatus({ status }) {
  const { rates, steps, step, state } = status, going = state === "running";
  document.title = `${going && steps ? `${Math.floor((100 * step) / steps)} % · ` : ""}${document.querySelector("h1").textContent}`;
  byId("algorithm").textContent = status.algorithm ? `· ${status.algorithm}` : "";
  byId("state").textContent = state;
  byId("state").className = `state ${state}`;
  byId("reason").textContent = status.reason ? `– ${status.reason}` : "";
  const progress = document.querySelector(".progress");
  progress.setAttribute("aria-valuemax", steps ?? 0);
  progress.setAttribute("aria-valuenow", step);
  progress.firstElementChild.style.width = `${steps ? (100 * step) / steps : 0}%`;
  const change = rates?.before ? rates.recent / rates.before - 1 : null;
  const rate = rates && [
    `median of ${rates.steps.length}, last ${seconds(rates.last)}`,
    change === null ? "" : `${change < 0 ? "−" : "+"}${Math.abs(100 * change).toFixed(0)} % against the steps before`,
    status.predicted_step_seconds ? `predicted ${seconds(status.predicted_step_seconds)}` : "",
  ].filter(Boolean).join("; ");
  const ends = going ? "End" : "Ended", most = status.ranks.reduce((a, b) => (!a || b.resident_bytes > a.resident_bytes ? b : a), null);
  const left = status.end === null ? "–" : going ? duration(status.end - status.time) : duration(status.time - status.end);
  const late = going && status.predicted_end ? `; at the predicted rate ${clock(status.predicted_end)}` : "";
  const last = status.checkpoint;
  byId("figures").replaceChildren(
    figure("Step", String(step), steps ? `of ${steps}` : "", `started ${status.started ? clock(status.started) : "–"}${status.restarts ? `; ${status.restarts} restarts` : ""}`),
    figure("Step time", ...split(rates ? seconds(rates.recent) : "–"), rate ?? "no step yet"),
    ..."tokens_per_s" in status.speed ? [speedFigure(status.speed)] : [],
    figure(ends, left, status.end === null ? "" : going ? "from now" : "ago", status.end === null ? "" : `${clock(status.end)}${late}`),
    figure("Memory", ...split(bytes(most?.resident_bytes)), most ? `of rank ${most.rank}, the fullest process` : "no rank reports"),
    figure("Checkpoint", last ? duration(status.time - last.time) : "–", last ? "old" : "", last ? last.path : "none yet"),
  );
}

function row(look, ...cells) {
  const found = make("tr", { className: look });
  for (const [text, kind] of cells)
    found.append(text instanceof Node ? make("td", { className: kind }, text) : make("td", { className: kind ?? "", textContent: text }));
  return found;
}

function showCosts({ costs, measured_steps: steps }) {
  byId("costs-section").hidden = !costs.length;
  const expected = costs.some((c) => c.predicted_seconds);
  byId("costs-lead").textContent = `Medians of ${steps} ${steps === 1 ? "step" : "steps"}${expected ? ", with predictions for the measured lengths" : ""}. Memory: tensors on the fullest device.`;
  byId("costs").replaceChildren(...costs.map((c) => {
    const ratio = c.predicted_seconds && c.seconds !== null ? (c.seconds / c.predicted_seconds).toFixed(2) : "–";
    const found = row(c.placement ? "" : "rest", [c.name, "word"], [c.placement ?? "", "word"], [seconds(c.predicted_seconds)], [seconds(c.seconds)], [ratio],
      [bytes(c.predicted_bytes)], [bytes(c.bytes)]);
    if (c.placement) found.dataset.call = c.name;
    return found;
  }));
}

function memoryBar(parts, whole) {
  const bar = make("div", { className: "memory" });
  for (const [look, size] of parts)
    if (size) {
      const part = make("i", { className: look });
      part.style.width = `${Math.min(100, (100 * size) / whole)}%`;
      bar.append(part);
    }
  return bar;
}

function showBatches({ status }) {
  byId("batches-section").hidden = !status.batches.length;
  byId("batches").replaceChildren(...status.batches.map((b) => row("", [b.batch, "word"], [b.done, "word"], [b.going_on, "word"], [b.age])));
}

function showRanks({ status, memory }) {
  const predicted = new Map(memory.map((device) => [device.rank, device]));
  const ranks = status.ranks.length ? status.ranks : memory.map((device) => ({ rank: device.rank, host: "", does: "no report" }));
  byId("ranks-section").hidden = !ranks.length;
  if (!ranks.length) return;
  const held = (r) => (r.device_limit_bytes ? r.device_bytes : r.resident_bytes) || 0;
  const peak = (r) => (r.device_limit_bytes ? 0 : r.peak_resident_bytes) || 0;
  const limit = (r) => r.device_limit_bytes ?? 0;
  const whole = 1.04 * Math.max(1, ...ranks.map((r) => Math.max(held(r), peak(r), limit(r), predicted.get(r.rank)?.peak_bytes ?? 0)));
  const known = memory[0]?.capacity_bytes;
  const silent = new Set(status.silent), going = status.state === "running", does = going ? "Current" : "Last";
  byId("ranks-lead").textContent = ranks.some(limit)
    ? `${does} work of each rank, and the memory of its device.`
    : `${does} work of each rank, and the memory of its process. Predictions count only tensors${known ? `; a plan may use ${bytes(known)} per rank` : ""}.`;
  byId("ranks").replaceChildren(...ranks.map((r) => {
    const device = predicted.get(r.rank);
    const tip = [`rank ${r.rank}`, `held now\t${bytes(held(r))}`, peak(r) ? `most so far\t${bytes(peak(r))}` : "", device ? `predicted peak\t${bytes(device.peak_bytes)} in ${device.during}` : "",
      limit(r) ? `limit\t${bytes(limit(r))}` : "", limit(r) ? `its process\t${bytes(r.resident_bytes)}` : ""].filter(Boolean).join("\n");
    const bar = memoryBar([["peak", peak(r)], ["held", held(r)], ["expected", device?.peak_bytes], ["limit", limit(r)]], whole);
    bar.dataset.tip = tip;
    const idle = status.speed[`idle/rank-${r.rank}`];
    const doing = silent.has(r.rank) ? `silent for ${duration(status.time - r.time)}, last: ${r.does}` : r.does;
    return row(silent.has(r.rank) ? "silent" : "", [String(r.rank), "word"], [r.host, "word"], [doing, "word does"],
      [idle === undefined ? "" : percent(idle)], [going && r.since ? duration(r.time - r.since) : ""], [bar, "word meter"], [bytes(held(r))], [bytes(device?.peak_bytes)]);
  }));
}

function showEntries({ status, checkpoints, notes, downloads }) {
  const none = [make("li", {}, make("span", { className: "soft", textContent: "none yet" }))];
  const entries = checkpoints.map((c) => make("li", {}, make("span", { textContent: c.name }), make("span", { textContent: `${duration(status.time - c.time)} ago` })));
  byId("checkpoints").replaceChildren(...(entries.length ? entries : none));
  const said = notes.toReversed().map((n) => make("li", {}, make("bdi", { textContent: n.text }), make("span", { textContent: n.time ? clock(n.time) : "" })));
  byId("notes").replaceChildren(...(said.length ? said : none));
  byId("downloads").replaceChildren(...downloads.map((name) =>
    make("a", { href: `/${name}?${new URLSearchParams({ token })}`, textContent: `${name} (for ui.perfetto.dev)` })));
}

let sampled = "";
async function showSamples({ sampled: steps }) {
  byId("samples-section").hidden = !steps.length;
  const select = byId("sampled"), text = steps.join();
  if (text === sampled) return;
  const follows = !sampled || select.selectedIndex === 0;
  const before = select.value;
  sampled = text;
  select.replaceChildren(...steps.toReversed().map((step) => new Option(step, step)));
  if (!follows) select.value = before;
  else await chooseSamples();
}

// Turns of the model and of its environment differ in colour, weight and border.
function showParts({ parts, left_out: missing, failed }) {
  const shown = parts.map((p) => {
    const reward = p.reward === null ? [] : [make("span", { className: "reward", textContent: ` reward ${number(p.reward)}` })];
    return make("span", { className: p.sampled ? "turn action" : "turn observation" }, make("bdi", { textContent: p.text.trim() }), ...reward);
  });
  if (missing) shown.push(make("span", { className: "turn", textContent: `… ${missing} more` }));
  if (failed) shown.push(make("span", { className: "turn failed", textContent: failed }));
  return shown;
}

async function chooseSamples() {
  const rows = await ask("/api/samples", { step: byId("sampled").value });
  byId("samples-legend").hidden = !rows.some((r) => r.parts);
  byId("samples").replaceChildren(...rows.map((r) => {
    const numbers = Object.entries(r.numbers).map(([name, value]) => make("span", {}, `${name} `, make("b", { textContent: number(value) })));
    // <bdi>: a text may change the writing direction, which must not affect the next text.
    const parts = r.parts ? showParts(r) : [make("bdi", { textContent: r.completion })];
    const text = make("p", { className: "text" }, make("bdi", { className: "prompt", textContent: r.prompt }), ...parts);
    text.tabIndex = text.textContent.length > 600 || parts.length > 6 ? 0 : -1;
    return make("article", { className: "sample" }, text, make("div", { className: "numbers" }, ...numbers));
  }));
}
byId("sampled").addEventListener("change", chooseSamples);

let drawn = "";
async function showStep() {
  const found = await ask("/api/step");
  byId("step-section").hidden = !found;
  const text = JSON.stringify(found);
  if (!found || text === drawn) return;
  drawn = text;
  byId("step-title").textContent = `Step ${found.step}`;
  const expected = found.predicted_seconds ? ` The row below each rank is the prediction for a single step, ${seconds(found.predicted_seconds)}, on the same scale.` : "";
  byId("step-lead").textContent = `${seconds(found.seconds)} from the first instruction to the end of the last one.${expected}${
    found.ranks < shown.status.ranks.length ? ` The picture shows ${found.ranks} of ${shown.status.ranks.length} ranks.` : ""}`;
  const gutter = document.querySelector(".gutter");
  gutter.setAttribute("height", found.height);
  plot.setAttribute("height", found.height);
  gutter.innerHTML = found.gutter;
  plot.innerHTML = found.plot;
  chooseLabels();
}

let shown = null, state = "";
async function refresh() {
  try {
    shown = await ask("/api/run");
    if (!charts.size) {
      for (const [metric, label] of shown.curves) addChart(metric, label || metric);
      addChart(SECONDS, SECONDS);
    }
    showStatus(shown);
    showCosts(shown);
    showBatches(shown);
    showRanks(shown);
    showEntries(shown);
    await Promise.all([pollMetrics(), showStep(), showSamples(shown)]);
    state = shown.status.state;
    byId("link").textContent = state === "running" ? `live · ${new Date().toLocaleTimeString()}` : `as of ${new Date().toLocaleTimeString()}`;
    byId("link").className = "";
  } catch (error) {
    byId("link").textContent = error.message;
    byId("link").className = "lost";
  }
}

// A run that has ended may be resumed, so keep polling, but less often.
let next = 0, busy = false;
async function tick() {
  if (busy || document.hidden || Date.now() < next) return;
  busy = true;
  const begin = Date.now();
  await refresh();
  // Wait three times as long as the refresh took, so that the page of a large run does not load its machine.
  next = Date.now() + Math.max(state === "running" ? POLL : 5 * POLL, 3 * (Date.now() - begin));
  busy = false;
}
setInterval(tick, 500);
document.addEventListener("visibilitychange", () => { next = 0; });
tick();
