// Points [step, value] in order of their steps: one for every `stride` steps, and the last one. A growing stride limits
// them to KEPT points.
class Curve extends Array {
  stride = 1;

  // After a resume, a repeated step replaces the old point of this step and all later points.
  add(step, value) {
    while (this.length && this.at(-1)[0] >= step) this.pop();
    if (value === null || value === undefined) return;
    if (this.length > 1 && this.bucket(this.length - 1) === this.bucket(this.length - 2)) this.pop();
    this.push([step, value]);
    while (this.length > KEPT) {
      this.stride *= 2;
      const kept = [...this].filter((_, i) => i === 0 || i === this.length - 1 || this.bucket(i) !== this.bucket(i - 1));
      this.splice(0, this.length, ...kept);
    }
  }

  bucket(i) { return Math.floor(this[i][0] / this.stride); }
}

class Chart {
  constructor(metric, label) {
    this.metric = metric;
    this.clear();
    this.cursor = null;
    this.now = make("p", { className: "now" });
    this.svg = draw("svg", { tabindex: "0", role: "img" });
    this.element = make("div", { className: "chart" }, make("h3", { textContent: label }), this.now, this.svg);
    this.label = label;
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
    this.svg.addEventListener("blur", () => { this.cursor = null; this.draw(); });
    this.svg.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  clear() {
    this.train = new Curve();
    this.eval = new Curve();
  }

  get points() { return this.train.length ? this.train : this.eval; }

  point(x) {
    if (!this.scale || !this.points.length) return;
    const step = this.scale.step(x);
    let best = 0;
    this.points.forEach((p, i) => { if (Math.abs(p[0] - step) < Math.abs(this.points[best][0] - step)) best = i; });
    this.cursor = best;
    this.draw();
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.cursor = Math.min(last, Math.max(0, (this.cursor ?? last) + by));
    this.draw();
  }

  say() {
    const last = this.cursor === null ? this.points.at(-1) : this.points[this.cursor];
    const parts = [];
    if (last) parts.push(`step ${last[0]}: `, make("b", { textContent: number(last[1]) }));
    const evaluation = this.train.length && this.eval.findLast((p) => !last || p[0] <= last[0]);
    if (evaluation) parts.push(` · evaluation ${evaluation[0]}: `, make("b", { textContent: number(evaluation[1]) }));
    this.now.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${this.label}: ${this.now.textContent}`);
  }

  draw() {
    this.say();
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    const all = [...this.train, ...this.eval];
    if (!all.length) {
      this.svg.replaceChildren(draw("text", { class: "none", x: width / 2, y: height / 2 }, "nothing yet"));
      return;
    }
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const [step, value] of all) {
      low = Math.min(low, value); high = Math.max(high, value);
      first = Math.min(first, step); last = Math.max(last, step);
    }
    if (this.metric === SECONDS) low = 0;
    if (high - low < 1e-9 * Math.max(1, Math.abs(high))) { const half = Math.abs(high) * 0.1 || 1; low -= half; high += half; }
    const size = 10 ** Math.floor(Math.log10((high - low) / 3));
    const spacing = [1, 2, 5, 10].map((f) => f * size).find((s) => (high - low) / s <= 4);
    const ticks = [];
    for (let n = Math.ceil(low / spacing - 1e-9); n * spacing <= high + spacing * 1e-9; n += 1) ticks.push(Number((n * spacing).toPrecision(12)));
    // Use enough digits to tell the ticks apart.
    const digits = Math.max(4, 1 + Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / spacing)));
    const words = ticks.map((tick) => number(tick, digits)), left = 10 + 6.2 * Math.max(...words.map((w) => w.length)), bottom = height - 20;
    const x = (step) => left + (last > first ? (step - first) / (last - first) : 0.5) * (width - left - 8);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 8);
    this.scale = { step: (px) => first + ((px - left) / (width - left - 8)) * (last - first) };
    const parts = ticks.flatMap((tick, i) => [
      draw("line", { class: "grid", x1: left, x2: width - 4, y1: y(tick), y2: y(tick) }),
      draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, words[i]),
    ]);
    parts.push(draw("text", { x: left, y: height - 4 }, String(first)));
    if (last > first) parts.push(draw("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, `step ${last}`));
    const line = (points) => points.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
    const smooth = this.train.length >= SMOOTH_FROM;
    parts.push(draw("polyline", { class: `raw${smooth ? " faded" : ""}`, points: line(this.train) }));
    if (this.train.length === 1) parts.push(draw("circle", { class: "train", cx: x(this.train[0][0]), cy: y(this.train[0][1]), r: 3 }));
    if (smooth) parts.push(draw("polyline", { class: "smooth", points: line(average(this.train)) }));
    parts.push(draw("polyline", { class: "eval", points: line(this.eval) }));
    for (const [step, value] of this.eval) parts.push(draw("circle", { cx: x(step), cy: y(value), r: this.eval.length > 60 ? 1.5 : 3 }));
    const at = this.cursor === null ? null : this.points[this.cursor];
    if (at) {
      parts.push(draw("line", { class: "cursor", x1: x(at[0]), x2: x(at[0]), y1: 4, y2: bottom }));
      parts.push(draw("circle", { class: this.train.length ? "train" : "", cx: x(at[0]), cy: y(at[1]), r: 3.5 }));
    }
    this.svg.replaceChildren(...parts);
  }
}

// Replace each point by the mean of the points around it.
function average(points) {
  const half = Math.max(2, Math.floor(points.length / 50)), sums = [0];
  for (const [, value] of points) sums.push(sums.at(-1) + value);
  return points.map(([step], i) => {
    const from = Math.max(0, i - half), to = Math.min(points.length, i + half + 1);
    return [step, (sums[to] - sums[from]) / (to - from)];
  });
}
