"use strict";
(() => {
  const trialTable = (table) => {
    // Sorting: numbers by value, text by name, empty cells last in either direction.
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];

    const sortBy = (column, ascending) => {
      const numeric = heads[column].dataset.kind === "number";
      const key = (row) => row.cells[column]?.dataset.sort;  // a failed trial has no cells for figures
      const sign = ascending ? 1 : -1;
      rows.sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        return sign * (numeric ? Number(x) - Number(y) : x.localeCompare(y));
      });
      body.append(...rows);
      heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : ascending ? "ascending" : "descending"));
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () =>
      sortBy(column, head.getAttribute("aria-sort") !== "ascending")));

    // Filtering: a word anywhere in the row, and one choice each of state, variant, engine and trace.
    const form = document.getElementById("filters");
    const search = document.getElementById("filter-text");
    const selects = [...form.querySelectorAll("select")];
    const count = document.getElementById("filter-count");
    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        const fits = words.every((word) => text.includes(word)) &&
          selects.every((select) => !select.value || row.dataset[select.dataset.filter] === select.value);
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${rows.length} trials`;
    };
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
  };
  const trials = document.getElementById("trial-table");  // the trend page has none
  if (trials) trialTable(trials);

  // The data behind each figure. A text that a spreadsheet would run as a formula gets a quote in front.
  const field = (value) => {
    if (value === null) return "";
    let text = String(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const toCsv = (data) => [data.columns, ...data.rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.csv");
    if (!button) return;
    const data = JSON.parse(document.getElementById(button.dataset.csv).textContent);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([toCsv(data)], { type: "text/csv" }));
    link.download = button.dataset.name;
    link.click();
    URL.revokeObjectURL(link.href);
  });

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const target = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(target.textContent);
        button.textContent = "Copied";
      } catch {  // a file opened from disk may not write to the clipboard: select the text instead
        getSelection().selectAllChildren(target);
        button.textContent = "Selected";
      }
    });
  }

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
