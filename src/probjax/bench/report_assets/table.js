// The table of all rows: every column, sorted by its heading, filtered by words.

const FIRST_ROWS = 60;

// ratioOf(file, row) is the speed beside the chosen peer, or null; ratioWords names that column.
function resultTable(host, ratioOf, ratioWords) {
  const several = DATA.files.length > 1;
  const columns = readingOrder([...new Set(DATA.files.flatMap((file) => file.columns))].filter((column) => DATA.files.some((file) => {
    const at = file.columns.indexOf(column);
    return at >= 0 && file.rows.some((row) => row[at] !== null);
  })));
  const place = columns.indexOf("median_ms") + 1 || columns.length;
  const records = DATA.files.flatMap((file, number) => {
    const at = columns.map((column) => file.columns.indexOf(column));
    return file.rows.map((row, index) => {
      const cells = at.map((i) => (i < 0 ? null : row[i]));
      cells.splice(place, 0, ratioOf(number, index));
      return { cells: several ? [file.name, ...cells] : cells, text: null };
    });
  });
  const names = [...columns];
  names.splice(place, 0, ratioWords);
  if (several) names.unshift("file");
  const numeric = names.map((_, i) => records.some((record) => isNumber(record.cells[i])) && !records.some((record) => typeof record.cells[i] === "string" && !/^(nan|-?inf)$/i.test(record.cells[i])));
  const state = host.tableState || (host.tableState = { sort: null, down: false, filter: "", all: false });

  const body = el("tbody");
  const count = el("span", { class: "soft", role: "status" });
  const more = el("button", { type: "button", onclick: () => { state.all = true; draw(); } });
  const search = el("input", { type: "search", placeholder: "Filter: words, or column=value", "aria-label": "Filter the rows", value: state.filter, oninput: () => { state.filter = search.value; draw(); } });
  const heads = names.map((name, i) => el("th", { class: numeric[i] ? "n" : null, scope: "col" }, el("button", { type: "button", onclick: () => {
    state.down = state.sort === name ? !state.down : false;
    state.sort = name;
    draw();
  } }, name)));

  function draw() {
    const tests = state.filter.toLowerCase().split(/\s+/).filter(Boolean).map(wordTest(names));
    let shown = records.filter((record) => tests.every((test) => test(record)));
    const by = names.indexOf(state.sort);
    if (by >= 0) shown = [...shown].sort((a, b) => compareCells(a.cells[by], b.cells[by], state.down));
    heads.forEach((head, i) => {
      if (i === by) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.firstChild.textContent = names[i] + (i === by ? (state.down ? " ↓" : " ↑") : "");
    });
    const visible = state.all ? shown : shown.slice(0, FIRST_ROWS);
    body.replaceChildren(...visible.map((record) => el("tr", {}, record.cells.map((value, i) =>
      el("td", { class: numeric[i] ? "n" : null, title: typeof value === "string" && value.length > 30 ? value : null }, cellText(value))))));
    count.textContent = shown.length === records.length ? `${records.length} rows` : `${shown.length} of ${records.length} rows`;
    more.textContent = `Show all ${shown.length}`;
    more.hidden = visible.length === shown.length;
  }
  draw();
  host.replaceChildren(
    el("h2", {}, "All rows"),
    el("div", { class: "bar" }, search, count, more),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All rows" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
  );
}

// What was measured first, then the numbers most looked for, then the others; else the order of the file.
function readingOrder(columns) {
  const lead = ["median_ms", "q1_ms", "q3_ms", "rel_err"].filter((column) => columns.includes(column));
  const rest = columns.filter((column) => !lead.includes(column));
  const first = rest.findIndex((column) => /_(ms|s|mb)$/.test(column));
  const place = first < 0 ? rest.length : first;
  return [...rest.slice(0, place), ...lead, ...rest.slice(place)];
}

function cellText(value) {
  if (value === null || value === undefined) return "";
  if (isNumber(value) && value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  if (isNumber(value)) return Number.isInteger(value) ? String(value) : Number(value.toPrecision(4)).toString();
  return String(value);
}

// "column=value" looks in one column, any other word in all of them.
function wordTest(names) {
  return (word) => {
    const [column, value] = word.split("=", 2);
    const at = value === undefined ? -1 : names.findIndex((name) => name.toLowerCase() === column);
    if (at >= 0) return (record) => String(record.cells[at] ?? "").toLowerCase() === value;
    return (record) => (record.text ??= record.cells.map((cell) => String(cell ?? "")).join(" ").toLowerCase()).includes(word);
  };
}

// Numbers by size, then words; what is missing always comes last.
function compareCells(a, b, down) {
  const rank = (value) => (isNumber(value) ? 0 : value === null || value === undefined ? 2 : 1);
  if (rank(a) !== rank(b)) return rank(a) === 2 || rank(b) === 2 ? rank(a) - rank(b) : (rank(a) - rank(b)) * (down ? -1 : 1);
  const order = rank(a) === 0 ? a - b : rank(a) === 1 ? String(a).localeCompare(String(b), "en", { numeric: true }) : 0;
  return down ? -order : order;
}
