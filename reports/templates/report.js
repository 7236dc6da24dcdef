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
  image.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // else the same key closes the dialog by its button
    open();
  });
}
dialog.addEventListener("click", () => dialog.close());
// Open all tables for printing.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("section details:not(td details)")) details.open = true;
});
// Figures: their files. Data and large pictures are stored as gzip in base64.
const decoded = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const stored = async (id) => {
  const bytes = decoded(document.getElementById(id).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};
// Vega's own reader of CSV compiles a function for the columns, which the content security policy forbids.
const rowsOf = (csv) => {
  const rows = [[]];
  for (const [, quoted, plain, end] of csv.matchAll(/(?:"((?:[^"]|"")*)"|([^,\n]*))(,|\n|$)/g)) {
    rows.at(-1).push(quoted?.replaceAll('""', '"') ?? plain);
    if (end === "\n") rows.push([]);
  }
  const [heads, ...lines] = rows.filter((row) => row.length > 1);
  return lines.map((line) => Object.fromEntries(heads.map((head, i) => [head, line[i]])));
};
const offer = (name, blob) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
};
for (const figure of document.querySelectorAll("figure")) {
  const { name, csv } = figure.dataset;
  const files = document.createElement("span");
  files.className = "files";
  const add = (label, give) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", give);
    files.append(button);
  };
  const image = figure.querySelector("img");
  const picture = async () => {
    const content = image.hasAttribute("src") ? decoded(image.src.split(",")[1]) : await stored(`svg-${name}`);
    return new Blob([content], { type: "image/svg+xml" });
  };
  if (document.getElementById(`data-${csv}`))
    add("CSV", async () => offer(`${csv}.csv`, new Blob([await stored(`data-${csv}`)], { type: "text/csv" })));
  if (!image.src.startsWith("data:image/png")) {
    const svg = picture();
    add("SVG", async () => offer(`${name}.svg`, await svg));
    if (!image.hasAttribute("src")) svg.then((blob) => { image.src = URL.createObjectURL(blob); });
  }
  figure.querySelector("figcaption").append(files);
}
// The interactive chart, if the page has one.
const chart = document.getElementById("explorer-spec");
if (chart) {
  const spec = JSON.parse(chart.textContent);
  const numbers = { step: "number", seconds: "number", value: "number", low: "number", high: "number", runs: "number" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const findRun = ({ env_id, name, setting, seed }) =>
    [...document.querySelectorAll("#t-runs tbody tr")].find((row) =>
      [env_id, name, setting, String(seed)].every((text, i) => row.cells[i].textContent === text));
  const draw = async (data) => {
    const colour = getComputedStyle(document.body).color;
    const columns = Math.max(1, Math.floor(document.getElementById("curves").clientWidth / 220));
    const drawn = structuredClone(spec);
    drawn.data.values = data;
    drawn.data.format = { type: "json", parse: numbers };
    if (dark.matches) drawn.encoding.color.scale.range = spec.usermeta.dark;
    const text = { labelColor: colour, titleColor: colour };
    const grey = { gridColor: colour, gridOpacity: 0.15, domainColor: colour, tickColor: colour };
    const config = { background: null, axis: { ...text, ...grey }, legend: { ...text, orient: "top", columns, labelLimit: 300, symbolStrokeColor: colour }, view: { stroke: null } };
    const { view } = await embedChart("#curves", drawn, { ast: true, actions: false, config, renderer: "svg" });
    view.addEventListener("click", (_, item) => {
      const row = item?.datum?.run ? findRun(item.datum) : item?.datum?.[0]?.run ? findRun(item.datum[0]) : null;
      if (!row) return;
      for (const other of row.parentElement.querySelectorAll(".found")) other.classList.remove("found");
      row.classList.add("found");
      row.closest("details")?.setAttribute("open", "");
      row.scrollIntoView({ block: "center" });
    });
  };
  stored("data-curves_steps").then(async (csv) => {
    const data = rowsOf(csv);
    await draw(data);
    dark.addEventListener("change", () => draw(data));
  });
}
