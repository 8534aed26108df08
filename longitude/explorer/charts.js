"use strict";
// Draws each chart once, then feeds it new rows: a slider moves faster than charts are built.
window.longitude = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = {};
  const rows = {};  // what each chart shows, by name
  let params = {};

  // A table of columns, {a: [1, 2], b: [3, 4]}, as rows.
  function unfolded(columns, more) {
    const names = Object.keys(columns || {});
    if (!names.length) return [];
    return columns[names[0]].map((_, n) => {
      const row = { ...more };
      for (const name of names) row[name] = columns[name][n];
      return row;
    });
  }

  function pairs(grid, length) {
    const collected = [];
    const count = grid.tokens.length, cell = 40 / count;
    grid.believed.forEach((line, i) => line.forEach((distance, j) => collected.push({
      // a hair wider than they are, so that no seams show
      query: i * cell, query_end: (i + 1) * cell + 0.05, key: j * cell, key_end: (j + 1) * cell + 0.05,
      query_token: grid.tokens[i], key_token: grid.tokens[j],
      believed: distance < 0 ? null : distance, past: grid.past[i][j] === 1,
    })));
    return collected;
  }

  // The rows of every chart, from an answer of the server.
  function collect(answer, labels) {
    const collected = { map: [], decay: [], wavelengths: [], stretch: [], scale: [], keys: [] };
    answer.columns.forEach((column, n) => {
      if (column.mistake) return;
      const label = { label: labels[n], column: "ABC"[n] };
      for (const name of ["map", "decay", "wavelengths", "scale"])
        collected[name].push(...unfolded(column[name], label));
      collected.stretch.push(...unfolded(column.wavelengths, label).filter((row) => row.stretch > 0));
      const wide = column.length / 300;  // a few tokens of very many are still to be seen
      const runs = unfolded(column.keys, label).map((run) =>
        ({ ...run, end: Math.min(column.length, Math.max(run.last + 1, run.first + wide)) }));
      collected.keys.push(...runs.sort((a, b) => (b.last - b.first) - (a.last - a.first)));
      collected[`bias${n + 1}`] = unfolded(column.bias);
      collected[`pairs${n + 1}`] = pairs(column.pairs, column.length);
    });
    collected.wavelengths = collected.wavelengths.filter((row) => row.scaled > 0);
    return collected;
  }

  function box(name) { return document.getElementById(`chart-${name}`); }

  async function embed(name) {
    const theme = dark.matches ? "dark" : "light";
    const spec = structuredClone(data.charts[name.replace(/\d$/, "")]);
    spec.config = data.themes[theme];
    for (const param of spec.params) param.value = params[param.name] ?? param.value;
    spec.datasets = { rows: rows[name] };
    const plain = name.startsWith("pairs");  // thousands of cells
    const { view } = await vegaEmbed(box(name), spec, {
      mode: "vega-lite", renderer: plain ? "canvas" : "svg", actions: false, ast: true,
      tooltip: { theme },
    });
    views[name] = view;
  }

  async function feed(name) {
    const view = views[name];
    for (const [key, value] of Object.entries(params)) view.signal(key, value);
    await view.data("rows", rows[name]).runAsync();
  }

  function forget(name) {
    if (!views[name]) return;
    views[name].finalize();
    delete views[name];
    box(name).replaceChildren();
  }

  // Show an answer: new charts where there were none, new rows where there were.
  async function show(answer, labels) {
    params = { window: answer.asked.window, length: answer.asked.length };
    const collected = collect(answer, labels);
    for (const name of Object.keys(rows)) delete rows[name];
    Object.assign(rows, collected);
    const drawable = Object.keys(rows).filter((name) => rows[name].length);
    for (const name of Object.keys(views)) if (!drawable.includes(name)) forget(name);
    for (const figure of document.querySelectorAll("figure")) {
      const name = figure.id.replace("figure-", "");
      figure.hidden = !drawable.some((one) => one.replace(/\d$/, "") === name);
    }
    for (const panel of document.querySelectorAll(".panel"))
      panel.hidden = !drawable.includes(panel.id.replace("panel-", ""));
    for (const name of drawable) await (views[name] ? feed(name) : embed(name));
  }

  async function redraw() {
    for (const name of Object.keys(views)) { forget(name); await embed(name); }
  }

  return { data, dark, views, rows, show, redraw };
})();
