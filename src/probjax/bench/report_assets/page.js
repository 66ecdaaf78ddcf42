// The page: headers, controls and sections. A change of a control draws the plots anew from the state.

const state = { suite: 0, hidden: new Set(), choices: {}, overlay: false };
const several = DATA.files.length > 1;
const chosen = (suite) => (state.choices[suite.name] ??= { select: suite.selectors.map((s) => s.default), peer: suite.peer, measure: {} });
const valueOf = (point, column) => {
  const file = DATA.files[point.file];
  const at = file.columns.indexOf(column);
  return at < 0 ? null : file.rows[point.row][at];
};
const unique = (values) => [...new Set(values)];

function headers() {
  document.getElementById("files").replaceChildren(...DATA.files.map((file) => el("article", {},
    el("h3", {}, file.name),
    el("p", {}, headline(file)),
    file.note ? el("p", { class: "soft" }, file.note) : null,
    Object.keys({ ...file.device, ...file.extra }).length ? el("details", {}, el("summary", {}, "Machine and versions"), pairs({ ...file.device, ...file.extra })) : null,
    file.config ? el("details", {}, el("summary", {}, "Configuration"), numbered("Configuration", [file.config].flat(2))) : null,
    file.runs.length ? el("details", {}, el("summary", {}, "Runs"), numbered("Run", file.runs)) : null,
  )));
  const labels = unique(DATA.files.map((file) => file.label));
  const unsure = labels.length < 2 || labels.some((label) => /not recorded|unknown/.test(label));
  const notice = document.getElementById("comparison");
  notice.hidden = !several;
  notice.textContent = `${unsure ? "These files are different runs and may come from different machines" : "These files come from different machines"}: absolute times of different machines do not compare. Speed ratios do, since both sides of a ratio were measured in the same file.`;
}

function headline(file) {
  const facts = { ...file.extra, ...file.device };
  const first = (...names) => names.map((name) => facts[name]).find((value) => value !== null && value !== undefined);
  const words = [file.label, withName(first("cores_used", "cores"), "cores"), withName(first("threads"), "threads")];
  for (const name of ["jax", "jaxlib", "torch", "numpy", "python"]) if (facts[name]) words.push(`${name} ${facts[name]}`);
  const runs = file.runs.length ? file.runs : [facts];
  for (const revision of unique(runs.map((run) => run.git_revision && `revision ${String(run.git_revision).slice(0, 10)}${run.git_dirty ? " with local changes" : ""}`))) words.push(revision);
  if (runs.some((run) => run.interrupted)) words.push("interrupted: holds what was measured until then");
  return [...words, `${file.rows.length} rows`].filter(Boolean).join(" · ");
}
const withName = (value, name) => (value === undefined ? null : `${value} ${name}`);

function pairs(entries) {
  if (typeof entries !== "object" || entries === null) return el("p", {}, String(entries));
  const text = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
  return el("dl", {}, Object.entries(entries).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, text(value))]));
}

const numbered = (words, entries) => entries.flatMap((entry, i) => [entries.length > 1 ? el("p", { class: "soft" }, `${words} ${i + 1}`) : null, pairs(entry)]);

function suiteTabs() {
  const nav = document.getElementById("suites");
  nav.hidden = DATA.suites.length < 2;
  nav.replaceChildren(...DATA.suites.map((suite, i) => el("button", { type: "button", "aria-pressed": String(i === state.suite), onclick: () => { state.suite = i; drawAll(); } }, columnWords(suite.name))));
}

function picker(words, values, current, onpick, text = String) {
  const select = el("select", { onchange: () => { onpick(values[select.selectedIndex]); } }, values.map((value) => el("option", { selected: value === current }, text(value))));
  return el("label", { class: "choice" }, words, select);
}

function controls(suite) {
  const choice = chosen(suite);
  const names = seriesNames(suite);
  const pickers = suite.selectors.map((selector, i) => picker(columnWords(selector.column), selector.values, choice.select[i], (value) => { choice.select[i] = value; drawPlots(); }, (value) => (value === null ? "not given" : String(value))));
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Show or hide" }, names.map((name) => el("button", { type: "button", "aria-pressed": String(!state.hidden.has(name)), onclick: (event) => {
    if (!state.hidden.delete(name)) state.hidden.add(name);
    event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(name)));
    drawPlots();
  } }, swatch(seriesStyle(name, names)), name)));
  const arrange = filesOf(suite).length > 1 && suite.x ? picker("files", [false, true], state.overlay, (value) => { state.overlay = value; drawPlots(); }, (value) => (value ? "in one panel" : "side by side")) : null;
  const host = document.getElementById("controls");
  host.replaceChildren(...[...pickers, arrange, names.length > 1 ? legend : null].filter(Boolean));
  host.hidden = !host.children.length;
}

// Known labels first and always in the same order, the others as the file has them.
function seriesNames(suite) {
  const found = unique(suite.points.map((point) => point.series));
  const known = Object.keys(KNOWN_STYLES).filter((name) => found.includes(name));
  return [...known, ...found.filter((name) => !known.includes(name))];
}

const labelOf = (point) => point.label.map(([column, value]) => valueWords(column, value)).join(", ");
const filesOf = (suite) => unique(suite.points.map((point) => point.file)).sort((a, b) => a - b);

// A row without a value in a column fits every choice in it.
const agree = (select, others) => select.every((value, i) => value === null || others[i] === null || value === others[i]);
const fits = (suite, point) => agree(point.select, chosen(suite).select);

function plain(column) {
  const quartiles = column === "median_ms" ? ["q1_ms", "q3_ms"] : null;
  return (point) => {
    const y = valueOf(point, column);
    if (!isNumber(y) || y < 0) return null;
    return { y, low: quartiles && valueOf(point, quartiles[0]), high: quartiles && valueOf(point, quartiles[1]) };
  };
}

// How many times faster than the peer, in the same file and cell: of the same tag where there is one, else of any.
function ratio(suite, column, peer) {
  const key = (point) => JSON.stringify([point.file, point.x, point.over, point.down, point.label]);
  const peers = new Map();
  for (const point of suite.points) if (point.series === peer) peers.set(key(point), [...(peers.get(key(point)) ?? []), point]);
  const read = plain(column);
  return (point) => {
    const near = (peers.get(key(point)) ?? []).filter((candidate) => agree(candidate.select, point.select));
    const other = near.findLast((candidate) => candidate.tag === point.tag) ?? near.findLast((candidate) => candidate.tag === null) ?? near.at(-1);
    const mine = read(point), theirs = other && read(other);
    if (!mine || !theirs || !(mine.y > 0) || !(theirs.y > 0)) return null;
    return { y: theirs.y / mine.y, low: theirs.low / mine.high, high: theirs.high / mine.low };
  };
}

const peerWords = (suite) => (["remat", "variant"].includes(suite.series) ? `${suite.series} = ${chosen(suite).peer}` : chosen(suite).peer);

function sections(suite) {
  const { time, memory, other } = suite.measures;
  const choice = chosen(suite);
  const over = suite.x ? ` against ${columnWords(suite.x)}` : "";
  const list = [];
  const add = (id, title, columns, more) => {
    if (!columns.length) return;
    const column = choice.measure[id] ?? columns[0];
    list.push({ id, title, columns, column, read: plain(column), unit: unitOf(column), suffix: "", ...more });
  };
  const bars = (choice.measure.time ?? time[0]) === "median_ms" ? " Vertical bars span the quartiles." : "";
  add("time", `Time${over}`, time, { sub: `Lower is better.${suite.x ? " Both axes are logarithmic." : " Logarithmic axis."}${suite.x ? bars : bars.replace("Vertical", "Horizontal")}` });
  if (time.length && suite.peers.length) {
    const column = choice.measure.time ?? time[0];
    list.push({ id: "ratio", title: `Speed relative to ${peerWords(suite)}`, columns: [], column, peer: choice.peer, read: ratio(suite, column, choice.peer), unit: "", suffix: "×", reference: 1, sub: `Higher is better: 2× takes half the time of ${peerWords(suite)} in the same file. Bars span the quartiles of both, taken against each other.` });
  }
  add("memory", `Memory${over}`, memory, { sub: "Lower is better." });
  const longest = other.includes("max_seq");
  add("other", longest ? "Longest sequence within the memory limit" : `Error and compile time${over}`, other, { sub: longest ? "Higher is better. Logarithmic axis." : "Lower is better." });
  return list;
}

function drawSection(suite, section, width) {
  const choice = chosen(suite);
  const pick = section.peer
    ? picker("relative to", suite.peers, section.peer, (value) => { choice.peer = value; drawPlots(section.id); drawTable(); })
    : section.columns.length > 1 ? picker("show", section.columns, section.column, (value) => { choice.measure[section.id] = value; drawPlots(section.id); }, columnWords)
      : null;
  const host = el("section", { id: section.id, tabindex: -1 }, el("div", { class: "head" }, el("h2", {}, section.title), pick));
  const title = section.peer ? "" : `${columnWords(section.column).replace(/^./, (c) => c.toUpperCase())}${section.unit ? ` in ${section.unit}` : ""}. `;
  host.append(el("p", { class: "sub" }, title + section.sub));
  // The peer beside itself is the line at 1×, which every panel has.
  const points = suite.points.filter((point) => !state.hidden.has(point.series) && point.series !== section.peer && fits(suite, point))
    .map((point) => ({ point, ...section.read(point) })).filter((entry) => isNumber(entry.y));
  if (!points.length) host.append(el("p", { class: "soft" }, "No rows for this choice."));
  else host.append(suite.x ? lineGrid(suite, section, points, width) : dotGrid(suite, section, points, width));
  return host;
}

function lineGrid(suite, section, points, width) {
  const sides = filesOf(suite).length > 1 && !state.overlay ? filesOf(suite) : [null];
  const cells = suite.downValues.flatMap((down) => suite.overValues.map((over) => ({ down, over })))
    .filter(({ down, over }) => points.some((entry) => entry.point.over === over && entry.point.down === down));
  const fit = Math.max(1, Math.min(4, Math.floor((width + 20) / 330)));
  const across = unique(cells.map((cell) => cell.over)).length, downs = unique(cells.map((cell) => cell.down)).length;
  let perRow = (across > 1 ? across : cells.length) * sides.length;
  // Too narrow for one column per variant: then one per mode, so that a row still holds one kind of panel.
  if (perRow > fit && downs > 1 && downs * sides.length <= fit) {
    perRow = downs * sides.length;
    cells.sort((a, b) => suite.overValues.indexOf(a.over) - suite.overValues.indexOf(b.over));
  }
  const columns = perRow <= fit ? perRow : Math.max(1, fit >= sides.length ? fit - (fit % sides.length) : fit);
  const panelWidth = Math.min(620, Math.floor((width - 20 * (columns - 1)) / columns));
  const domain = { x: unique(points.map((entry) => entry.point.x)).sort((a, b) => a - b), y: points.flatMap((entry) => [entry.y, entry.low, entry.high]).filter((value) => isNumber(value) && (value > 0 || value === 0)) };
  if (section.reference) domain.y.push(section.reference);
  const panels = cells.flatMap((cell) => sides.map((side) => ({ ...cell, side, lines: linesOf(suite, points.filter(({ point }) =>
    point.over === cell.over && point.down === cell.down && (side === null || point.file === side))) })));
  const labelling = endLabels(panels.map((panel) => panel.lines), panelWidth);
  const grid = el("div", { class: "grid", style: `grid-template-columns:repeat(${columns},${panelWidth}px)` });
  for (const { down, over, side, lines } of panels) {
    const caption = [suite.over && valueWords(suite.over, over), suite.down && valueWords(suite.down, down)].filter(Boolean).join(", ");
    const detail = side !== null ? DATA.files[side].name : several && filesOf(suite).length === 1 ? DATA.files[filesOf(suite)[0]].name : "";
    grid.append(lines.length
      ? linePanel({ caption, detail, lines, width: panelWidth, domain, labelling, suffix: section.suffix, unit: section.unit, xWords: columnWords(suite.x), reference: section.reference })
      : el("figure", {}, el("figcaption", {}, caption, el("span", {}, ` · ${detail}`)), el("div", { class: "empty" }, "not measured in this file")));
  }
  return grid;
}

function linesOf(suite, entries) {
  const names = seriesNames(suite);
  const files = unique(entries.map((entry) => entry.point.file));
  const lines = new Map();
  for (const entry of entries) {
    const { series, tag, file } = entry.point;
    const key = JSON.stringify([series, tag, file]);
    if (!lines.has(key)) {
      const name = series + (tag ? ` (${tag})` : "") + (files.length > 1 ? ` [${DATA.files[file].name.replace(/\.json$/, "")}]` : "");
      lines.set(key, { name, rank: names.indexOf(series), style: seriesStyle(series, names), open: Boolean(tag), dashed: files.length > 1 && file !== files[0], main: series === "probjax_default", at: new Map() });
    }
    // A cell measured twice is drawn once, as measured last.
    lines.get(key).at.set(entry.point.x, { x: entry.point.x, y: entry.y, low: entry.low, high: entry.high });
  }
  return [...lines.values()].map((line) => ({ ...line, points: [...line.at.values()].sort((a, b) => a.x - b.x) })).sort((a, b) => a.main - b.main || b.rank - a.rank);
}

function dotGrid(suite, section, points, width) {
  const names = seriesNames(suite);
  const columns = several && width > 760 ? Math.min(DATA.files.length, Math.floor(width / 380)) : 1;
  const panelWidth = Math.min(820, Math.floor((width - 20 * (columns - 1)) / columns));
  const domain = { y: points.flatMap((entry) => [entry.y, entry.low, entry.high]).filter((value) => isNumber(value)) };
  if (section.reference) domain.y.push(section.reference);
  return el("div", { class: "grid", style: `grid-template-columns:repeat(${columns},${panelWidth}px)` }, DATA.files.map((file, number) => {
    const here = points.filter((entry) => entry.point.file === number);
    if (!here.length) return null;
    const row = (entry, name) => ({ name, style: seriesStyle(entry.point.series, names), open: Boolean(entry.point.tag), ...entry });
    const suffix = (entry) => (entry.point.tag ? ` (${entry.point.tag})` : "");
    const groups = names.length > 1
      ? unique(here.map((entry) => labelOf(entry.point))).map((title) => ({ title, rows: here.filter((entry) => labelOf(entry.point) === title).map((entry) => row(entry, entry.point.series + suffix(entry))) }))
      : [{ title: "", rows: here.map((entry) => row(entry, (labelOf(entry.point) || entry.point.series) + suffix(entry))) }];
    return dotPanel({ caption: several ? file.name : "", groups, width: panelWidth, domain, suffix: section.suffix, unit: section.unit, reference: section.reference });
  }));
}

function drawPlots(only, paper) {
  const main = document.getElementById("plots");
  const suite = DATA.suites[state.suite];
  if (!suite) {
    main.replaceChildren(el("p", { class: "notice" }, "The files hold no results."));
    return;
  }
  const width = paper ?? Math.floor(main.clientWidth);
  const drawn = sections(suite);
  // The time section's choice of column decides the ratio too.
  for (const section of drawn) if (only && document.getElementById(section.id) && (section.id === only || (only === "time" && section.id === "ratio"))) {
    const focused = document.activeElement?.tagName === "SELECT" && section.id === only;
    document.getElementById(section.id).replaceWith(drawSection(suite, section, width));
    if (focused) document.querySelector(`#${section.id} select`)?.focus();
  }
  if (only) return;
  const fixed = suite.constants.map(([column, value]) => `${columnWords(column)} ${typeof value === "string" ? valueWords(column, value) : value}`).join(" · ");
  const nothing = drawn.length ? null : el("p", { class: "notice" }, "This suite has no measurements to plot; its rows are in the table below.");
  const links = [...drawn.map((section) => [section.id, { time: "Time", ratio: "Speed ratio", memory: "Memory", other: section.column === "max_seq" ? "Longest sequence" : "Error, compile time" }[section.id]]), ["rows", "All rows"]];
  const jump = el("nav", { class: "sub jump", "aria-label": "On this page" }, links.map(([id, words]) => el("a", { href: `#${id}` }, words)));
  main.replaceChildren(...[jump, fixed ? el("p", { class: "sub" }, `Throughout: ${fixed}.`) : null, nothing, ...drawn.map((section) => drawSection(suite, section, width))].filter(Boolean));
}

function drawProblems() {
  const host = document.getElementById("problems");
  host.hidden = !DATA.problems.length;
  if (host.hidden) return;
  host.replaceChildren(el("h2", {}, "Not measured"), el("ul", {}, DATA.problems.map((problem) => el("li", {},
    el("strong", {}, problem.label || columnWords(problem.suite)), several ? ` in ${DATA.files[problem.file].name}` : "", `, ${problem.count} ${problem.count === 1 ? "row" : "rows"}: `, problem.reason,
    problem.where.map((words) => el("div", { class: "soft" }, words))))));
}

function drawTable() {
  const ratios = new Map();
  for (const suite of DATA.suites) if (suite.peers.length && suite.measures.time.length) {
    const read = ratio(suite, chosen(suite).measure.time ?? suite.measures.time[0], chosen(suite).peer);
    for (const point of suite.points) ratios.set(`${point.file} ${point.row}`, read(point)?.y ?? null);
  }
  const words = DATA.suites.length === 1 ? `speed / ${chosen(DATA.suites[0]).peer}` : "speed / peer";
  resultTable(document.getElementById("rows"), (file, row) => ratios.get(`${file} ${row}`) ?? null, words);
}

function drawAll() {
  suiteTabs();
  if (DATA.suites.length) controls(DATA.suites[state.suite]);
  drawPlots();
}

headers();
drawAll();
drawProblems();
drawTable();
// A sheet is narrower than the window that the panels were fitted to.
window.addEventListener("beforeprint", () => drawPlots(null, 700));
window.addEventListener("afterprint", () => drawPlots());
let lastWidth = document.getElementById("plots").clientWidth;
new ResizeObserver(() => requestAnimationFrame(() => {
  const width = document.getElementById("plots").clientWidth;
  if (width !== lastWidth) drawPlots();
  lastWidth = width;
})).observe(document.body);
