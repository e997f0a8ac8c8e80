"use strict";
// Filters of a report: rows, marks and figures whose facets do not match get the class "out". What lacks a facet stays.
(() => {
  const form = document.getElementById("filters");
  const field = (name) => form.elements.namedItem(name);
  const boxes = [...form.querySelectorAll('input[name="group"]')];
  const facets = "[data-task], [data-operators], [data-groups], [data-sizes]";
  const marked = [...document.querySelectorAll(facets)];
  const sections = [...document.querySelectorAll("section[data-device]")];
  const figures = [...document.querySelectorAll("main figure")];
  const lines = [...document.querySelectorAll("path[data-series]")].filter((e) => !e.hasAttribute("transform"));
  const paths = new Map(lines.map((line) => [line, line.getAttribute("d")]));

  const number = (name) => (field(name)?.value ? Number(field(name).value) : NaN);

  function chosen() {
    const groups = boxes.filter((box) => box.checked).map((box) => box.value);
    return {
      task: field("task").value.trim().toLowerCase(),
      operator: field("operator")?.value || "",
      device: field("device")?.value || "",
      groups: groups.length === boxes.length ? null : groups,
      symbol: field("symbol")?.value || "",
      from: number("from"),
      to: number("to"),
    };
  }

  function matches({ task, operators, groups, sizes }, filter) {
    if (filter.task && task !== undefined && !task.toLowerCase().includes(filter.task)) return false;
    if (filter.operator && operators !== undefined && !operators.split(" ").includes(filter.operator)) return false;
    if (filter.groups && groups !== undefined && !groups.split(" ").some((group) => filter.groups.includes(group))) return false;
    const size = sizes?.split(" ").find((pair) => pair.startsWith(`${filter.symbol}=`));
    if (size === undefined) return true;
    const value = Number(size.slice(filter.symbol.length + 1));
    return !(value < filter.from) && !(value > filter.to);
  }

  // A line leads through the points of its picture that are left.
  function redraw(line, filtered) {
    if (!filtered) { line.setAttribute("d", paths.get(line)); return; }
    const points = [...line.closest("svg").querySelectorAll("path[data-series][transform]:not(.out)")]
      .filter((point) => point.dataset.series === line.dataset.series)
      .map((point) => point.getAttribute("transform").match(/translate\(([^)]*)\)/)[1]);
    line.setAttribute("d", points.length ? `M${points.join("L")}` : "");
  }

  function mark(figure, filtered) {
    const inside = [...figure.querySelectorAll(facets)].filter((e) => e.tagName !== "TH" && e.tagName !== "TD");
    const left = inside.filter((e) => !e.classList.contains("out")).length;
    let note = figure.querySelector(".filtered");
    const text = !filtered ? "" : !inside.length && !figure.dataset.task ? "Filters do not apply here: all is shown."
      : inside.length && !left ? "Nothing here matches the filters." : "";
    if (!note && text) {
      note = document.createElement("p");
      note.className = "filtered";
      figure.querySelector("h3").after(note);
    }
    if (note) note.textContent = text;
  }

  function apply() {
    const filter = chosen();
    const sized = !Number.isNaN(filter.from) || !Number.isNaN(filter.to);
    const filtered = Boolean(filter.task || filter.operator || filter.device || filter.groups || sized);
    for (const element of marked) element.classList.toggle("out", !matches(element.dataset, filter));
    const nodes = new Map([...document.querySelectorAll("svg [data-node]")].map((node) => [node, node.classList.contains("out")]));
    for (const edge of document.querySelectorAll("svg [data-ends]")) {
      const svg = edge.closest("svg");
      const ends = edge.dataset.ends.split(" ");
      edge.classList.toggle("out", [...nodes].some(([node, out]) => out && svg.contains(node) && ends.includes(node.dataset.node)));
    }
    for (const line of lines) redraw(line, filtered);
    for (const section of sections) {
      const out = Boolean(filter.device) && section.dataset.device !== filter.device;
      section.classList.toggle("out", out);
      document.querySelector(`nav a[href="#${CSS.escape(section.id)}"]`)?.parentElement.classList.toggle("out", out);
    }
    for (const figure of figures) mark(figure, filtered);
    for (const table of document.querySelectorAll("main .scroll")) {
      const rows = [...table.querySelectorAll("tbody tr")];
      const left = rows.filter((row) => !row.classList.contains("out")).length;
      table.classList.toggle("out", rows.length > 0 && left === 0 && !table.closest("figure"));
      const count = table.parentElement.querySelector(":scope > summary .count");
      if (count) count.textContent = left === rows.length ? count.dataset.all : `${left} of ${count.dataset.all}`;
    }
    const names = (elements) => new Set(elements.filter((e) => e.dataset.task && !e.closest("section.out")).map((e) => e.dataset.task)).size;
    const all = new Set(marked.filter((e) => e.dataset.task).map((e) => e.dataset.task)).size;
    const left = names(marked.filter((e) => !e.classList.contains("out") && !e.closest("figure.out")));
    document.getElementById("filters-state").textContent = filtered
      ? `${left} of ${all} tasks match. Sentences above the pictures are about all of them.` : "";
  }

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => requestAnimationFrame(apply));
  apply(); // a browser may restore what was entered before
})();
