"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const token = new URLSearchParams(location.search).get("token");
const byId = (id) => document.getElementById(id);
const classes = data.classes.length > 0;
let row = {}, waiting = false, again = false, spoken = 0;

// ---------------------------------------------------------------- words and numbers
function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e9 || size < 1e-4)) return value.toExponential(2);
  const places = size >= 1000 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size || 1)));
  return value.toLocaleString("en", { maximumFractionDigits: places });
}
const percent = (share) => {
  const value = 100 * share;
  return (value > 99.5 && value < 100 ? ">99" : value < 0.5 && value > 0 ? "<1" : value.toFixed(0)) + " %";
};
function make(name, attributes = {}, ...inside) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inside);
  return element;
}
function draw(name, attributes = {}, ...inside) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inside);
  return element;
}

// ---------------------------------------------------------------- asking
async function ask() {
  if (waiting) { again = true; return; }
  waiting = true;
  try {
    const sweep = byId("sweep");
    const reply = await fetch("ask", {
      method: "POST",
      headers: { "content-type": "application/json", authorization: "Bearer " + token },
      body: JSON.stringify({ row, sweep: sweep ? sweep.value : null }),
    });
    const found = await reply.json();
    if (!reply.ok) throw new Error(found.error);
    byId("error").hidden = true;
    show(found);
  } catch (error) {
    byId("error").hidden = false;
    byId("error").textContent = error instanceof TypeError ? "The server does not answer any more." : error.message;
  } finally {
    waiting = false;
    if (again) { again = false; ask(); }
  }
}

// ---------------------------------------------------------------- showing
function show(found) {
  const { posterior, plain } = found;
  byId("plain-answer").textContent = shown(plain.prediction);
  byId("posterior-answer").textContent = shown(posterior.prediction);
  byId("plain-more").textContent = classes ? percent(plain.confidence) + " sure" : interval(plain, "its noise alone");
  byId("posterior-more").textContent = classes
    ? percent(posterior.confidence) + " sure"
    : interval(posterior, percent(data.coverage) + " of cases");
  byId("compared").replaceChildren(classes ? bars(plain, posterior) : axis(plain, posterior));
  decision(posterior);
  byId("notes").replaceChildren(...found.notes.map((note) => make("li", {}, note)));
  split(posterior);
  if (found.sweep) byId("curve").replaceChildren(curve(found.sweep));
  nearest(found.nearest);
  clearTimeout(spoken);
  spoken = setTimeout(() => {
    byId("spoken").textContent = `Plain network: ${byId("plain-answer").textContent}, ${byId("plain-more").textContent}. ` +
      `Posterior: ${byId("posterior-answer").textContent}, ${byId("posterior-more").textContent}. Decision: ${posterior.decision}.`;
  }, 700);
}
const interval = (answer, what) => `${shown(answer.lower)} to ${shown(answer.upper)} (${what})`;

function decision(answer) {
  const badge = byId("decision");
  badge.textContent = answer.decision;
  badge.classList.toggle("ask", answer.decision === "ask");
  byId("reason").textContent = answer.decision === "answer" ? "It is familiar and certain enough."
    : answer.unfamiliar >= data.unfamiliar ? "It is less familiar than 99 % of the held-out rows."
      : "It is too uncertain for the risk that was stated.";
}

function split(answer) {
  const total = answer.epistemic + answer.aleatoric;
  const whole = Math.max(total, classes ? Math.log(data.classes.length) : data.variance) || 1;
  const [first, second] = byId("split").children;
  first.style.width = (100 * answer.epistemic) / whole + "%";
  second.style.width = (100 * answer.aleatoric) / whole + "%";
  const share = total > 0 ? answer.epistemic / total : 0;
  const unit = classes ? " nats" : "";
  const size = (value) => (classes ? shown(value, 3) : "± " + shown(Math.sqrt(Math.max(value, 0)), 3));
  byId("epistemic").textContent = `epistemic ${size(answer.epistemic)}${unit} (${percent(share)}): more data would remove it`;
  byId("aleatoric").textContent = `aleatoric ${size(answer.aleatoric)}${unit} (${percent(1 - share)}): more data would not`;
  byId("split").setAttribute("aria-label", `${percent(share)} of the uncertainty is epistemic, ${percent(1 - share)} aleatoric`);
  const full = classes ? "an answer at random" : `the variance of ${data.target} in the training rows`;
  byId("familiar").textContent = `Less familiar than ${percent(answer.unfamiliar)} of the held-out rows. The whole width is ${full}.`;
}

// drawings are as wide as their place, so that their text has the size of other text
const room = () => Math.round(Math.min(700, Math.max(280, byId("compared").clientWidth || 600)));
function bars(plain, posterior) {
  const width = room(), side = Math.round(width * 0.22), longest = width - side - 104;
  const names = data.classes.map((name) => [name, plain["p_" + name], posterior["p_" + name]]);
  names.sort((a, b) => Math.max(b[1], b[2]) - Math.max(a[1], a[2]));
  names.splice(12);
  names.sort((a, b) => data.classes.indexOf(a[0]) - data.classes.indexOf(b[0]));
  const height = 30 * names.length + 4;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Probabilities of the classes" });
  names.forEach(([name, one, two], place) => {
    const y = 30 * place + 4;
    svg.append(draw("text", { x: side - 8, y: y + 16, "text-anchor": "end" }, name.length > 18 ? name.slice(0, 17) + "…" : name));
    svg.append(draw("rect", { class: "plain", stroke: "none", x: side, y: y + 1, width: Math.max(1, longest * one), height: 10, rx: 2 }));
    svg.append(draw("rect", { class: "posterior", stroke: "none", x: side, y: y + 13, width: Math.max(1, longest * two), height: 10, rx: 2 }));
    svg.append(draw("text", { x: width - 2, y: y + 17, "text-anchor": "end" }, `${percent(one)} / ${percent(two)}`));
  });
  svg.prepend(draw("title", {}, "Upper bars: plain network; lower bars: posterior"));
  return svg;
}

function axis(plain, posterior) {
  const ends = [plain.lower, plain.upper, posterior.lower, posterior.upper, data.mean - 2.5 * Math.sqrt(data.variance), data.mean + 2.5 * Math.sqrt(data.variance)];
  const low = Math.min(...ends), high = Math.max(...ends), width = room();
  const place = (value) => 20 + ((width - 40) * (value - low)) / (high - low || 1);
  const svg = draw("svg", { viewBox: `0 0 ${width} 92`, role: "img", "aria-label": "The intervals of both" });
  svg.append(draw("line", { class: "axis", x1: 20, x2: width - 20, y1: 66, y2: 66 }));
  for (const tick of ticks(low, high, width / 100)) {
    svg.append(draw("line", { class: "axis", x1: place(tick), x2: place(tick), y1: 8, y2: 70 }));
    svg.append(draw("text", { x: place(tick), y: 84, "text-anchor": "middle" }, shown(tick)));
  }
  [["plain", plain, 22], ["posterior", posterior, 46]].forEach(([name, answer, y]) => {
    svg.append(draw("line", { class: name, x1: place(answer.lower), x2: place(answer.upper), y1: y, y2: y, "stroke-width": 5, "stroke-linecap": "round", opacity: 0.55 }));
    svg.append(draw("circle", { class: name, cx: place(answer.prediction), cy: y, r: 6 }));
  });
  return svg;
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) || 10);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return found;
}

function curve(sweep) {
  const control = data.controls.find((each) => each.name === sweep.column);
  const key = classes ? "p_" + byId("posterior-answer").textContent : "prediction";
  const band = classes ? [] : [...sweep.posterior.lower, ...sweep.posterior.upper];
  const lines = [sweep.posterior[key], sweep.plain[key]];
  let low = classes ? 0 : Math.min(...band, ...lines[1]), high = classes ? 1 : Math.max(...band, ...lines[1]);
  if (low === high) { low -= 1; high += 1; }
  const width = room(), x = (value) => 56 + ((width - 70) * (value - sweep.values[0])) / (sweep.values.at(-1) - sweep.values[0]);
  const y = (value) => 190 - (176 * (value - low)) / (high - low);
  const path = (values) => values.map((value, i) => `${i ? "L" : "M"}${x(sweep.values[i]).toFixed(1)},${y(value).toFixed(1)}`).join("");
  const about = `${classes ? "The probability of " + key.slice(2) : data.target} if ${sweep.column} changes`;
  const svg = draw("svg", { viewBox: `0 0 ${width} 236`, role: "img", "aria-label": about });
  svg.append(draw("rect", { class: "range", x: x(control.low), y: 10, width: Math.max(1, x(control.high) - x(control.low)), height: 180 }));
  for (const tick of ticks(low, high, 4)) {
    svg.append(draw("line", { class: "axis", x1: 56, x2: width - 14, y1: y(tick), y2: y(tick) }));
    svg.append(draw("text", { x: 50, y: y(tick) + 4, "text-anchor": "end" }, classes ? percent(tick) : shown(tick, 3)));
  }
  for (const tick of ticks(sweep.values[0], sweep.values.at(-1), width / 100))
    svg.append(draw("text", { x: x(tick), y: 208, "text-anchor": "middle" }, shown(tick)));
  if (!classes) {
    const upper = path(sweep.posterior.upper);
    const lower = sweep.posterior.lower.map((value, i) => `L${x(sweep.values[i]).toFixed(1)},${y(value).toFixed(1)}`).reverse().join("");
    svg.append(draw("path", { class: "band", d: upper + lower + "Z" }));
  }
  svg.append(draw("path", { class: "plain line", d: path(lines[1]) }), draw("path", { class: "posterior line", d: path(lines[0]) }));
  const now = row[sweep.column];
  if (typeof now === "number" && now >= sweep.values[0] && now <= sweep.values.at(-1))
    svg.append(draw("line", { class: "now", x1: x(now), x2: x(now), y1: 10, y2: 190 }));
  svg.append(draw("text", { x: width / 2 + 21, y: 230, "text-anchor": "middle" }, sweep.column));
  return svg;
}

function nearest(rows) {
  if (data.picture) {
    byId("nearest").replaceChildren(make("ul", { class: "pictures" }, ...rows.map((each) => {
      const canvas = make("canvas", { width: data.picture.width, height: data.picture.height, role: "img", "aria-label": `A picture of ${each.target}` });
      paint(canvas, Array.from(atob(each.grey), (byte) => byte.charCodeAt(0)));
      return make("li", {}, canvas, make("strong", {}, shown(each.target)), make("br"), "distance " + shown(each.distance, 3));
    })));
    return;
  }
  const names = data.controls.map((control) => control.name);
  const look = ["", ...data.controls.map((control) => (control.kind === "text" ? "text" : "")), ""];
  const head = [data.target, ...names, "distance"].map((name, i) => make("th", { scope: "col", class: look[i] }, name));
  const body = rows.map((each) => make("tr", {}, ...[each.target, ...names.map((name) => each.cells[name]), each.distance]
    .map((value, i, all) => make("td", { class: look[i] }, i === all.length - 1 ? shown(value, 3) : shown(value)))));
  byId("nearest").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

// ---------------------------------------------------------------- the controls of a row
function setControl(element, control, value) {
  const [input, number] = [element.querySelector("[id]"), element.querySelector("input[type=number]")];
  const unknown = element.querySelector(".unknown");
  const missing = value === null || value === undefined;
  if (unknown) unknown.checked = missing;
  input.disabled = missing && Boolean(unknown);
  if (number) number.disabled = input.disabled;
  if (!missing) {
    input.value = String(value);
    if (number) number.value = String(value);
  }
  row[control.name] = missing ? null : value;
  const odd = element.querySelector(".odd");
  if (odd) odd.textContent = !missing && (value < control.low || value > control.high) ? "outside" : "";
}
function setRow(values) {
  document.querySelectorAll(".control").forEach((element) => {
    const control = data.controls[Number(element.dataset.place)];
    setControl(element, control, values[control.name]);
  });
}
function readControl(element, control, source) {
  if (source.classList.contains("unknown") && source.checked) return null;
  const number = element.querySelector("input[type=number]");
  const text = source === number ? number.value : element.querySelector("[id]").value;
  if (control.kind === "number") return text === "" || !Number.isFinite(Number(text)) ? row[control.name] ?? control.start : Number(text);
  if (control.kind === "boolean") return text === "true";
  if (control.kind === "text") return text;
  return text === "" ? row[control.name] : text;
}
function startRow() {
  const usual = Object.fromEntries(data.controls.map((control) => [control.name, control.start]));
  document.querySelectorAll(".control").forEach((element) => {
    const control = data.controls[Number(element.dataset.place)];
    element.addEventListener("input", (event) => {
      const value = readControl(element, control, event.target);
      const typed = event.target.type === "number" ? event.target.value : null;
      setControl(element, control, value);
      if (typed !== null) event.target.value = typed; // what is typed stays as it is
      if (control.kind === "number" && byId("sweep").value !== control.name) byId("sweep").value = control.name;
      ask();
    });
  });
  const sweep = byId("sweep");
  if (sweep.options.length === 0) byId("sweep-part").hidden = true;
  sweep.addEventListener("input", ask);
  byId("reset").addEventListener("click", () => { setRow(usual); ask(); });
  byId("example").addEventListener("click", () => { setRow(nextExample()); ask(); });
  setRow(usual);
}
let example = -1;
const nextExample = () => data.examples[(example = (example + 1) % data.examples.length)];

// ---------------------------------------------------------------- drawing a picture
function paint(canvas, greys) {
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  greys.forEach((grey, i) => image.data.set([grey, grey, grey, 255], 4 * i));
  context.putImageData(image, 0, 0);
}
function startPicture() {
  const { width, height, low, high, names } = data.picture;
  const canvas = byId("draw"), pixels = new Array(width * height).fill(low);
  let cursor = [Math.floor(width / 2), Math.floor(height / 2)], before = null;
  const update = () => {
    paint(canvas, pixels.map((value) => (255 * ((value ?? low) - low)) / (high - low || 1)));
    names.forEach((name, i) => { if (name !== null) row[name] = pixels[i]; });
    ask();
  };
  const dab = (x, y, radius) => { // full in the middle, nothing beyond the radius
    for (let i = 0; i < height; i++)
      for (let j = 0; j < width; j++) {
        const strength = Math.min(1, Math.max(0, 1.5 - Math.hypot(j + 0.5 - x, i + 0.5 - y) / radius));
        pixels[i * width + j] = Math.max(pixels[i * width + j], low + strength * (high - low));
      }
  };
  const stroke = (event) => {
    const box = canvas.getBoundingClientRect();
    const now = [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
    const from = before ?? now, steps = Math.ceil(4 * Math.hypot(now[0] - from[0], now[1] - from[1])) || 1;
    for (let i = 1; i <= steps; i++) dab(from[0] + ((now[0] - from[0]) * i) / steps, from[1] + ((now[1] - from[1]) * i) / steps, Math.max(width, height) / 14);
    before = now;
    update();
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); before = null; stroke(event); });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) stroke(event); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) cursor = [0, 1].map((axis) => Math.min([width, height][axis] - 1, Math.max(0, cursor[axis] + move[axis])));
    else if (event.key === " ") dab(cursor[0] + 0.5, cursor[1] + 0.5, 0.67);
    else if (event.key === "Delete" || event.key === "Backspace") pixels.fill(low);
    else return;
    event.preventDefault();
    update();
    const context = canvas.getContext("2d");
    context.fillStyle = "rgba(240, 160, 60, 0.8)";
    context.fillRect(cursor[0] + 0.25, cursor[1] + 0.25, 0.5, 0.5);
  });
  byId("reset").addEventListener("click", () => { pixels.fill(low); update(); });
  byId("example").addEventListener("click", () => {
    const next = nextExample();
    names.forEach((name, i) => { pixels[i] = name === null ? low : next[name]; });
    update();
  });
  const first = nextExample();
  names.forEach((name, i) => { pixels[i] = name === null ? low : first[name]; });
  update();
}

byId("form").addEventListener("submit", (event) => event.preventDefault());
if (data.picture) startPicture();
else { startRow(); ask(); }
