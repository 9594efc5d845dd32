"use strict";
// Sort a table by a column: the best value first, and in the other order at the next press.
const names = { inf: Infinity, "-inf": -Infinity };
const valueOf = (cell) => {
  const text = cell.dataset.value;
  const number = text in names ? names[text] : Number(text);
  return Number.isNaN(number) ? null : number;
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], given = [...body.rows];
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
        if (place === 0) return sign * (given.indexOf(a) - given.indexOf(b));
        const [one, two] = [valueOf(a.cells[place]), valueOf(b.cells[place])];
        if (one === null || two === null) return (one === null) - (two === null); // what was not measured comes last
        return one === two ? given.indexOf(a) - given.indexOf(b) : sign * (one < two ? -1 : 1);
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
