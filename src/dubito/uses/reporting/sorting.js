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
