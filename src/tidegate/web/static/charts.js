"use strict";
// Draws the load of the overview: points come with the page and with the news of it, so a page that is not looked at asks for nothing.
(() => {
  const POINTS_MAX = 600;
  const host = document.getElementById("charts");
  if (!host || !window.uPlot) return;
  const points = JSON.parse(host.dataset.points);
  const charts = new Map();
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => {
    for (const [unit, word] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= unit) return +(value / unit).toFixed(1) + word;
    return String(value < 1 ? +value.toPrecision(2) : +value.toFixed(value < 10 ? 1 : 0));
  };
  const element = (kind, name, text) => {
    const made = document.createElement(kind);
    made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  // Each line: its words, the variable of its colour, and its value of a point (null: nothing was known).
  const load = (name, place) => (point) => (point.deployments[name] ? point.deployments[name][place] : null);
  const wanted = () => {
    const last = points[points.length - 1];
    const found = [
      ["Requests a second", [["requests", "--accent", (point) => point.requests]]],
      ["Tokens a second", [["tokens", "--accent", (point) => point.tokens]]],
    ];
    for (const name of Object.keys(last.deployments)) {
      found.push([name, [
        ["background calls", "--accent", load(name, 0)],
        ["tide", "--good", (point) => load(name, 1)(point) || null],
        ["interactive calls", "--warn", load(name, 2)],
      ]]);
    }
    return found;
  };
  // At least five minutes up to the last point: of a single one uPlot would make a chart of a day.
  const minutes = (plot, low, high) => {
    const last = plot.data?.[0]?.at(-1) ?? high;
    return [Math.min(low, last - 300), last];
  };
  const draw = (title, lines) => {
    const figure = element("figure", "chart");
    const caption = element("figcaption", "", title);
    const legend = element("p", "legend");
    const values = lines.map(([words, variable]) => {
      const item = element("span", "key" + variable, words + " ");
      const value = element("b", "");
      item.append(value);
      legend.append(item);
      return value;
    });
    const box = element("div", "plot");
    box.setAttribute("role", "img");
    figure.append(caption, legend, box);
    host.append(figure);
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const plot = new window.uPlot({
      width: Math.max(200, box.clientWidth), height: 150, legend: { show: false }, cursor: { show: false },
      tzDate: (at) => window.uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
      scales: { x: { range: minutes }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, space: 60, size: 28, values: (_, marks) => marks.map((at) => new Date(at * 1e3).toISOString().slice(11, 16)) }, { ...axis, size: 48, space: 32, values: (_, marks) => marks.map(short) }],
      series: [{}, ...lines.map(([, variable], at) => ({
        stroke: color(variable), width: 1.5, points: { show: (plot) => plot.data[0].length === 1 }, dash: variable === "--good" ? [5, 4] : undefined,
        fill: at === 0 ? color(variable) + "22" : undefined,
      }))],
    }, [[], ...lines.map(() => [])], box);
    charts.set(title, { figure, plot, box, values, lines });
  };
  const show = () => {
    const now = wanted();
    for (const [title, chart] of charts) {
      if (now.some((one) => one[0] === title)) continue;
      chart.plot.destroy();
      chart.figure.remove();
      charts.delete(title);
    }
    for (const [title, lines] of now) {
      if (!charts.has(title)) draw(title, lines);
      const chart = charts.get(title);
      // Of a deployment only those moments are known at which someone looked.
      const seen = title === now[0][0] || title === now[1][0] ? points : points.filter((point) => point.deployments[title]);
      const columns = chart.lines.map((line) => seen.map(line[2]));
      chart.plot.setData([seen.map((point) => point.at), ...columns]);
      const words = chart.lines.map((line, at) => [line[0], columns[at].at(-1)]);
      words.forEach(([, value], at) => { chart.values[at].textContent = value === null || value === undefined ? "–" : short(value); });
      chart.box.setAttribute("aria-label", title + ": " + words.map(([name, value]) => name + " " + (value === null ? "unknown" : value)).join(", "));
    }
  };
  const again = () => {
    for (const chart of charts.values()) { chart.plot.destroy(); chart.figure.remove(); }
    charts.clear();
    show();
  };
  if (!points.length) return;
  host.hidden = false;
  show();
  document.addEventListener("htmx:sseMessage", () => {
    const point = JSON.parse(document.getElementById("now").dataset.point);
    if (point.at <= points[points.length - 1].at) return;
    points.push(point);
    if (points.length > POINTS_MAX) points.shift();
    show();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  new ResizeObserver(() => {
    for (const chart of charts.values()) chart.plot.setSize({ width: Math.max(200, chart.box.clientWidth), height: 150 });
  }).observe(host);
})();
