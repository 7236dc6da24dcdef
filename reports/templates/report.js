// Tables: click a heading to sort, type to filter. Figures: click to enlarge.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const key = (row, column) => row.cells[column].dataset.sort ?? "";
  table.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows];
      const numbers = head.classList.contains("n");
      rows.sort((a, b) => {
        const x = key(a, column), y = key(b, column);
        if (x === "" || y === "") return (x === "") - (y === ""); // rows without a value come last
        const order = numbers ? Number(x) - Number(y) : x.localeCompare(y, undefined, { numeric: true });
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
}
for (const input of document.querySelectorAll(".filter")) {
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.getElementById(input.dataset.table).tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}
const dialog = document.querySelector("dialog");
const large = dialog.querySelector("img");
for (const image of document.querySelectorAll("figure img")) {
  const open = () => { large.src = image.src; large.alt = image.alt; dialog.showModal(); };
  image.addEventListener("click", open);
  image.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
}
dialog.addEventListener("click", () => dialog.close());
// Open all tables for printing.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("section > details")) details.open = true;
});
