"use strict";
// Sort a table by a column: the best value first, and in the other order at the next press.
const names = { inf: Infinity, "-inf": -Infinity };
const valueOf = (cell) => { // a number, also in "± 1,200" and "98 % sure"; or text; or null for what was not measured
  const text = cell.dataset.value ?? cell.textContent;
  if (text in names) return names[text];
  const number = parseFloat(text.replace(/[±,\s]/g, ""));
  return text === "–" || text === "nan" ? null : Number.isNaN(number) ? text : number;
};
const compare = (one, two) => {
  if (typeof one === typeof two) return typeof one === "string" ? one.localeCompare(two) : (one > two) - (one < two);
  return typeof one === "number" ? -1 : 1;
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], given = [...body.rows], list = table.closest(".listing");
  if (given.length < 2) continue;
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = head.dataset.first || "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = given.slice().sort((a, b) => {
        if (place === 0 && !list) return sign * (given.indexOf(a) - given.indexOf(b));
        const [one, two] = [valueOf(a.cells[place]), valueOf(b.cells[place])];
        if (one === null || two === null) return (one === null) - (two === null); // what was not measured comes last
        return sign * compare(one, two) || given.indexOf(a) - given.indexOf(b);
      });
      body.append(...rows);
    });
  });
}

// The legend of a section singles out one method in its figures: pointing at it for a moment, pressing it for good.
for (const section of document.querySelectorAll("section")) {
  const items = [...section.querySelectorAll(".legend li[data-method]")];
  if (items.length < 2) continue;
  const marks = [...section.querySelectorAll('figure [id*="-method-"]')];
  let pressed = null;
  const single = (method) => marks.forEach((mark) => {
    mark.classList.toggle("dim", method !== null && !mark.id.includes(`-${method}-`));
  });
  const buttons = items.map((item) => {
    const button = document.createElement("button"), method = item.dataset.method;
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("pointerenter", () => single(method));
    button.addEventListener("pointerleave", () => single(pressed));
    button.addEventListener("click", () => {
      pressed = pressed === method ? null : method;
      buttons.forEach((each, place) => each.setAttribute("aria-pressed", String(items[place].dataset.method === pressed)));
      single(pressed);
    });
    return button;
  });
}

// A figure says its values where one points at it, touches it, or goes with the arrow keys.
for (const figure of document.querySelectorAll("figure[data-readings]")) {
  const parts = JSON.parse(figure.dataset.readings), svg = figure.querySelector("svg");
  const stops = parts.flatMap((part) => part.stops.map(([at, title, values]) => ({ part, at, title, values })));
  const size = svg.viewBox.baseVal, name = "http://www.w3.org/2000/svg";
  const marks = document.createElementNS(name, "g"), label = document.createElement("div");
  let shown = -1;
  marks.classList.add("marks");
  label.className = "reading";
  label.setAttribute("role", "status");
  svg.append(marks);
  svg.tabIndex = 0;
  svg.setAttribute("aria-description", "The arrow keys read its values.");
  figure.append(label);

  const mark = (shape, attributes) => {
    const drawn = document.createElementNS(name, shape);
    for (const [key, value] of Object.entries(attributes)) drawn.setAttribute(key, value);
    marks.append(drawn);
  };
  const hide = () => { shown = -1; marks.replaceChildren(); label.replaceChildren(); };
  const show = (place) => {
    if (place === shown) return;
    hide();
    shown = place;
    const { part, at, title, values } = stops[place], [left, top, right, bottom] = part.box, along = part.by === "x";
    if (along) mark("line", { x1: at, x2: at, y1: top, y2: bottom });
    for (const [, other] of values) {
      if (other !== null) mark("circle", { cx: along ? at : other, cy: along ? other : at, r: 3 });
    }
    const head = document.createElement("strong");
    head.textContent = title;
    label.append(head);
    for (const [what, , text] of values) {
      const row = document.createElement("div"), number = document.createElement("b");
      number.textContent = text;
      row.append(`${what} `, number);
      label.append(row);
    }
    const x = along ? at : (values[0][1] ?? left), y = along ? top : at;
    const box = svg.getBoundingClientRect(), own = figure.getBoundingClientRect();
    label.style.top = `${box.top - own.top + (y / size.height) * box.height + (along ? 4 : 10)}px`;
    const room = own.width - label.offsetWidth - 8, wanted = box.left - own.left + (x / size.width) * box.width;
    const before = wanted - label.offsetWidth - 10;  // on the side that hides less
    label.style.left = `${Math.max(4, x < size.width * 0.55 ? Math.min(wanted + 10, room) : Math.min(before, room))}px`;
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * size.width;
    const y = ((event.clientY - box.top) / box.height) * size.height;
    const away = ({ part, at }) => {
      const outside = Math.max(part.box[1] - y, y - part.box[3], 0);
      return 1000 * outside + Math.abs(at - (part.by === "x" ? x : y));
    };
    show(stops.reduce((best, stop, place) => (away(stop) < away(stops[best]) ? place : best), 0));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const last = stops.length - 1;
    const places = {
      ArrowRight: Math.min(shown + 1, last), ArrowDown: Math.min(shown + 1, last), ArrowLeft: Math.max(shown - 1, 0),
      ArrowUp: Math.max(shown - 1, 0), Home: 0, End: last,
    };
    if (event.key === "Escape") hide();
    if (!(event.key in places)) return;
    event.preventDefault();
    show(places[event.key]);
  });
}

// Pressing a row or a point of a section with choices shows its command and copies it.
for (const box of document.querySelectorAll(".choice")) {
  const commands = JSON.parse(box.dataset.choices), code = box.querySelector("code"), section = box.closest("section");
  const rows = [...section.querySelectorAll("tr[data-choice]")], button = document.createElement("button");
  const points = [...section.querySelectorAll('figure [id*="-candidate-"]')], told = "Press a point or a row.";
  const keyOf = (point) => point.id.split("-candidate-")[1];
  code.textContent = told;
  box.setAttribute("aria-live", "polite");
  button.type = "button";
  button.textContent = "Copy";
  button.hidden = true;
  box.append(button);
  const copy = async () => {
    getSelection().selectAllChildren(code); // also for browsers that refuse the clipboard to a file
    try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch { button.textContent = "Copy"; }
  };
  const choose = (key) => {
    if (!(key in commands)) return;
    code.textContent = commands[key];
    button.hidden = false;
    rows.forEach((row) => row.setAttribute("aria-selected", String(row.dataset.choice === key)));
    points.forEach((point) => point.classList.toggle("chosen", keyOf(point) === key));
    copy();
  };
  button.addEventListener("click", copy);
  for (const point of points) point.addEventListener("click", () => choose(keyOf(point)));
  for (const row of rows) {
    row.tabIndex = 0;
    row.addEventListener("click", () => choose(row.dataset.choice));
    row.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(row.dataset.choice);
    });
  }
}
