"use strict";
// Draws every chart in the theme of the page, and keeps its view where it can be asked for its data.
(() => {
  const page = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = {};
  let pinned = null;

  function choose(label) {
    for (const view of Object.values(views)) view.signal("chosen", label).runAsync();
  }

  async function drawn(name, chart) {
    const theme = dark.matches ? "dark" : "light";
    const spec = { ...chart.spec, config: page.themes[chart.section][theme] };
    const box = document.getElementById(`chart-${name}`);
    const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: chart.actions || false, tooltip: { theme } };
    if (views[name]) views[name].finalize();
    const { view } = await vegaEmbed(box, spec, options);
    views[name] = view;
    view.addEventListener("pointerover", (_, item) => {
      const label = item && item.datum && item.datum.label;
      if (label && !pinned) choose(label);
    });
    view.addEventListener("pointerout", () => { if (!pinned) choose(null); });
  }

  async function draw() {
    for (const [name, chart] of Object.entries(page.charts)) await drawn(name, chart);
    if (pinned) choose(pinned);
  }

  function pick(button) {
    const label = button.dataset.label;
    pinned = pinned === label ? null : label;
    for (const other of document.querySelectorAll(".pick"))
      other.setAttribute("aria-pressed", String(other.dataset.label === pinned));
    choose(pinned);
  }

  for (const button of document.querySelectorAll(".pick")) {
    button.addEventListener("click", () => pick(button));
    button.addEventListener("pointerenter", () => { if (!pinned) choose(button.dataset.label); });
    button.addEventListener("pointerleave", () => { if (!pinned) choose(null); });
  }

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // not allowed here: select it, so that one key copies it
      window.getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }
  for (const button of document.querySelectorAll(".copy"))
    button.addEventListener("click", () => copy(button));

  window.longitude = { views, ready: draw() };
  dark.addEventListener("change", () => {
    window.longitude.ready = window.longitude.ready.then(draw);
  });
})();
