// A dot plot, for suites with no length to plot against: one row per case, values on a logarithmic axis.

// groups: [{title, rows: [{name, style, open, y, low, high}]}]
function dotPanel({ caption, groups, width, domain, suffix, unit, reference }) {
  const rowHeight = 22;
  const rows = groups.flatMap((group) => group.rows);
  const names = Math.max(...rows.map((row) => textWidth(row.name, 12)), ...groups.map((group) => textWidth(group.title, 12.5)));
  const left = Math.min(names + 14, width * 0.45);
  const right = Math.max(...rows.map((row) => textWidth(shortNumber(row.y) + suffix))) + 16;
  const height = (rows.length + groups.filter((group) => group.title).length) * rowHeight + 44;
  const x = logScale(domain.y, left + 6, width - right, { room: 46 });
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${caption}: ${rows.map((row) => `${row.name} ${shortNumber(row.y)}${suffix}`).join("; ")}` });
  for (const tick of x.ticks) drawing.append(
    svg("line", { class: tick === reference ? "one" : "tick", x1: x.place(tick), x2: x.place(tick), y1: 4, y2: height - 34 }),
    svg("text", { x: x.place(tick), y: height - 20, "text-anchor": "middle" }, tickText(tick) + suffix),
  );
  if (unit) drawing.append(svg("text", { x: width - right, y: height - 5, "text-anchor": "end" }, unit));
  let y = 4 + rowHeight / 2;
  for (const group of groups) {
    if (group.title) {
      drawing.append(svg("text", { class: "group", x: 0, y: y + 4 }, clipped(group.title, left - 8)));
      y += rowHeight;
    }
    for (const row of group.rows) {
      drawing.append(...dotRow(row, x, y, left, suffix));
      y += rowHeight;
    }
  }
  return el("figure", {}, caption ? el("figcaption", {}, el("span", {}, caption)) : null, drawing);
}

function dotRow(row, x, y, left, suffix) {
  const colour = `--c:var(--s${row.style.colour})`;
  const bar = row.low > 0 && row.high > row.low ? svg("line", { class: "spread", style: colour, x1: x.place(row.low), x2: x.place(row.high), y1: y, y2: y }) : null;
  const end = Math.max(x.place(row.y), bar ? x.place(row.high) : 0);
  return [
    svg("text", { class: "name", x: left - 8, y: y + 4, "text-anchor": "end" }, clipped(row.name, left - 10), svg("title", {}, row.name)),
    bar, mark(row.style, x.place(row.y), y, row.open), svg("text", { x: end + 9, y: y + 4 }, shortNumber(row.y) + suffix),
  ].filter(Boolean);
}

function clipped(text, room) {
  if (textWidth(text, 12) <= room) return text;
  let kept = text;
  while (kept.length > 1 && textWidth(`${kept}…`, 12) > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}
