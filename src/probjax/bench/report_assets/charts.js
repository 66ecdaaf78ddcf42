// One panel of small multiples: lines over a logarithmic length, quartile bars, labels at the ends of the lines.

const PANEL_HEIGHT = 244;

// lines: [{name, style, open, dashed, main, points: [{x, y, low, high}]}]; every panel of a section gets the same domain
// and labelling (see endLabels), so that their axes line up.
function linePanel({ caption, detail, lines, width, domain, labelling, suffix, unit, xWords, reference }) {
  // Single points lie on top of each other, and so would their labels.
  const labelled = labelling.text && lines.some((line) => line.points.length > 1);
  const texts = labelled ? lines.map((line) => labelling.text(line.name)) : null;
  const right = labelling.room;
  const top = 22, bottom = PANEL_HEIGHT - 34;
  const y = logScale(domain.y, bottom, top);
  const labels = y.ticks.map((tick) => tickText(tick) + suffix);
  const left = Math.max(...labels.map((label) => textWidth(label, 11))) + 8;
  const x = logScale(domain.x, left + 8, width - right, { pad: 0, room: 30 });
  const drawing = svg("svg", { width, height: PANEL_HEIGHT, viewBox: `0 0 ${width} ${PANEL_HEIGHT}`, role: "img", "aria-label": summary(caption, detail, lines, xWords) });
  y.ticks.forEach((tick, i) => drawing.append(
    svg("line", { class: tick === reference ? "one" : "tick", x1: left, x2: width - right, y1: y.place(tick), y2: y.place(tick) }),
    svg("text", { x: left - 6, y: y.place(tick) + 4, "text-anchor": "end" }, labels[i]),
  ));
  if (unit) drawing.append(svg("text", { x: 0, y: 9 }, unit));
  drawXAxis(drawing, x, thin(domain.x, x.place, 12 + Math.max(...domain.x.map((value) => textWidth(String(value), 11)))), left, width - right, bottom, xWords);
  for (const line of lines) drawing.append(...curve(line, x, y));
  if (texts) drawing.append(...placedLabels(lines, texts, x, y, top, bottom, width - right));
  const figure = el("figure", { tabindex: 0 }, el("figcaption", {}, caption, detail ? el("span", {}, caption ? ` · ${detail}` : detail) : null), drawing);
  addReadout(figure, drawing, lines, x, { top, bottom, width, suffix, unit, xWords });
  return figure;
}

function drawXAxis(drawing, x, ticks, left, right, bottom, words) {
  drawing.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const tick of ticks) drawing.append(
    svg("line", { class: "axis", x1: x.place(tick), x2: x.place(tick), y1: bottom, y2: bottom + 4 }),
    svg("text", { x: x.place(tick), y: bottom + 16, "text-anchor": "middle" }, String(tick)),
  );
  drawing.append(svg("text", { x: right, y: bottom + 31, "text-anchor": "end" }, words));
}

function curve(line, x, y) {
  const colour = `--c:var(--s${line.style.colour})`;
  const at = line.points.map((point) => [x.place(point.x), y.place(point.y)]);
  const path = at.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  const kind = `curve${line.main ? " main" : ""}${line.dashed ? " dashed" : ""}`;
  const spreads = line.points.map((point, i) => spread(point, colour, at[i][0], y.place));
  return [svg("path", { class: kind, style: colour, d: path }), ...spreads, ...at.map(([px, py]) => mark(line.style, px, py, line.open))];
}

function spread(point, colour, px, place) {
  if (!(point.low > 0 && point.high > point.low)) return null;
  return svg("line", { class: "spread", style: colour, x1: px, x2: px, y1: place(point.low), y2: place(point.high) });
}

// How lines are labelled at their ends: in full when that fits; not at all when there are too many to tell apart.
function endLabels(panels, width) {
  const names = panels.flatMap((lines) => lines.map((line) => line.name));
  const texts = Math.max(...panels.map((lines) => lines.length)) > 12 ? [] : [(name) => name, (name) => name.replace(/^probjax_/, "")];
  for (const text of texts) {
    const widest = Math.max(...names.map((name) => textWidth(text(name))));
    if (widest < width * 0.34) return { text, room: widest + 16 };
  }
  return { text: null, room: 16 };
}

function placedLabels(lines, texts, x, y, top, bottom, right) {
  const end = Math.max(...lines.map((line) => x.place(line.points.at(-1).x)));
  const labels = lines.map((line, i) => {
    const last = line.points[line.points.length - 1];
    const px = x.place(last.x), py = y.place(last.y);
    return { text: texts[i], colour: `--c:var(--s${line.style.colour})`, px, py, at: py, inside: px < end - 20 };
  });
  spreadOut(labels.filter((label) => !label.inside), 12.5, top - 4, bottom + 4);
  const obstacles = lines.flatMap((line) => trace(line, x, y));
  for (const label of labels.filter((label) => label.inside)) freePlace(label, obstacles, top, right);
  return labels.flatMap((label) => [
    !label.inside && Math.abs(label.at - label.py) > 5 ? svg("line", { class: "leader", style: label.colour, x1: label.px + 5, x2: label.px + 11, y1: label.py, y2: label.at }) : null,
    svg("text", { class: label.inside ? "series inside" : "series", style: label.colour, x: label.px + (label.shift ?? 13), y: label.at + 4 }, label.text),
  ]);
}

// Points every few pixels along a line, to see what a label would cover.
function trace(line, x, y) {
  const at = line.points.map((point) => [x.place(point.x), y.place(point.y)]);
  return at.slice(1).flatMap(([bx, by], i) => {
    const [ax, ay] = at[i];
    const steps = Math.ceil(Math.hypot(bx - ax, by - ay) / 4);
    return Array.from({ length: steps + 1 }, (_, step) => [ax + ((bx - ax) * step) / steps, ay + ((by - ay) * step) / steps]);
  });
}

// A line that ends inside the panel: its label goes beside, above or below the end, wherever it covers least.
function freePlace(label, obstacles, top, right) {
  const wide = textWidth(label.text);
  const room = right - label.px - wide;
  const candidates = [[8, 0], [Math.min(-6, room), -14], [Math.min(4, room), 15], [-wide + 6, -14], [-wide + 6, 15], [Math.min(4, room), -28], [Math.min(8, room), 28]];
  const cost = ([dx, dy]) => obstacles.filter(([ox, oy]) => ox > label.px + dx - 2 && ox < label.px + dx + wide + 2 && Math.abs(oy - label.py - dy) < 8).length
    + (label.py + dy < top || dx > Math.max(room, 4) ? 100 : 0) + Math.hypot(dx > 0 ? dx : 0, dy) / 20;
  const [dx, dy] = candidates.reduce((best, candidate) => (cost(candidate) < cost(best) ? candidate : best));
  label.shift = dx;
  label.at = label.py + dy;
  for (let px = 0; px <= wide; px += 4) for (const py of [-4, 0, 4]) obstacles.push([label.px + dx + px, label.at + py]);
}

// Moves labels apart, in order, within the panel.
function spreadOut(labels, gap, top, bottom) {
  labels.sort((a, b) => a.at - b.at);
  for (let i = 1; i < labels.length; i++) labels[i].at = Math.max(labels[i].at, labels[i - 1].at + gap);
  let limit = bottom;
  for (let i = labels.length - 1; i >= 0; i--) {
    labels[i].at = Math.min(labels[i].at, limit);
    limit = labels[i].at - gap;
  }
  for (let i = 0; i < labels.length; i++) labels[i].at = Math.max(labels[i].at, top + i * Math.min(gap, (bottom - top) / labels.length));
}

function summary(caption, detail, lines, xWords) {
  const parts = lines.map((line) => {
    const last = line.points[line.points.length - 1];
    return `${line.name} ${shortNumber(last.y)} at ${last.x}`;
  });
  return `${[caption, detail].filter(Boolean).join(", ")} against ${xWords}: ${parts.join("; ")}`;
}

// The values at one length, by pointer, by touch, or by the arrow keys when the panel has the focus.
function addReadout(figure, drawing, lines, x, { top, bottom, width, suffix, unit, xWords }) {
  const lengths = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
  const cursor = svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  drawing.append(cursor);
  let index = -1, tip = null;
  const hide = () => {
    if (tip) tip.remove();
    tip = null;
    index = -1;
    cursor.setAttribute("visibility", "hidden");
  };
  const show = (next) => {
    if (next === index || next < 0 || next >= lengths.length) return;
    hide();
    index = next;
    const length = lengths[index], px = x.place(length);
    cursor.setAttribute("x1", px);
    cursor.setAttribute("x2", px);
    cursor.setAttribute("visibility", "visible");
    tip = readout(lines, length, `${xWords} ${length}`, suffix || (unit ? ` ${unit}` : ""));
    figure.append(tip);
    tip.style.left = `${px < width / 2 ? Math.min(px + 12, width - tip.offsetWidth) : Math.max(0, px - 12 - tip.offsetWidth)}px`;
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * width;
    show(lengths.reduce((best, length, i) => Math.abs(x.place(length) - px) < Math.abs(x.place(lengths[best]) - px) ? i : best, 0));
  };
  drawing.addEventListener("pointermove", nearest);
  drawing.addEventListener("pointerdown", nearest);
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      event.preventDefault();
      show(index < 0 ? (step > 0 ? 0 : lengths.length - 1) : index + step);
    } else if (event.key === "Escape") hide();
  });
}

function readout(lines, length, title, suffix) {
  const found = lines.map((line) => ({ line, point: line.points.find((point) => point.x === length) })).filter((entry) => entry.point);
  found.sort((a, b) => a.point.y - b.point.y);
  return el("div", { class: "tip", role: "status" }, el("div", { class: "soft" }, title), el("table", {}, found.map(({ line, point }) =>
    el("tr", {}, el("td", {}, swatch(line.style, line.open)), el("td", {}, line.name), el("td", { class: "n" }, shortNumber(point.y) + suffix),
      el("td", { class: "soft" }, point.low > 0 && point.high > point.low ? `${shortNumber(point.low)} – ${shortNumber(point.high)}` : "")))));
}
