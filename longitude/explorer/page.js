"use strict";
// The controls: their values are the link, and the link is the request to the server.
(() => {
  const { data, dark, rows, views, show, redraw } = window.longitude;
  const form = document.getElementById("controls");
  const $ = (id) => document.getElementById(id);
  const LETTERS = "ABC", SIZES = ["window", "length", "dim", "heads"];
  const PACE = 120;  // milliseconds between two requests while a slider moves
  const still = data.still;
  let answer = null, snippetColumn = 1, asking = false, again = false, snippetTimer = 0, snippetRequest = 0, offered = null;

  // ---- numbers and sliders
  const kinds = {
    even: { to: (v) => v, from: (p) => p },
    powers: { to: (v) => Math.log2(v), from: (p) => 2 ** p },
    tens: { to: (v) => Math.log10(v), from: (p) => 10 ** p },
  };
  const round = (value, whole) => whole ? Math.round(value) : Number(value.toPrecision(3));
  const isWhole = (name) => SIZES.includes(name);
  const counted = (n) => Number(n).toLocaleString("en-US", { maximumSignificantDigits: 6 });

  function place(name, value) {  // a number into its field and its slider
    const field = $(name), slide = $(`${name}-slide`);
    if (document.activeElement !== field) field.value = value ?? "";
    if (value == null || document.activeElement === slide) return;
    slide.value = kinds[slide.dataset.kind].to(value);
    slide.setAttribute("aria-valuetext", counted(value));
  }

  function slid(slide) {
    const name = slide.dataset.for;
    const value = round(kinds[slide.dataset.kind].from(Number(slide.value)), isWhole(name));
    $(name).value = value;
    $(name).dataset.given = "yes";
    slide.setAttribute("aria-valuetext", counted(value));
  }

  // ---- the state, as the query of a link
  const shown = () => [1, 2, 3].filter((n) => !$(`card${n}`).hidden);

  function query() {
    const params = new URLSearchParams();
    for (const name of ["model", "own", ...SIZES]) if ($(name).value) params.set(name, $(name).value);
    shown().forEach((n, at) => {
      const method = $(`method${n}`).value;
      params.set(`method${at + 1}`, method);
      for (const name of ["base", "factor"])
        if ($(`${name}${n}`).dataset.given && $(`${name}${n}`).value) params.set(`${name}${at + 1}`, $(`${name}${n}`).value);
      if (method === "written") params.set(`text${at + 1}`, $(`text${n}`).value);
      if ($(`layer${n}`).dataset.given) params.set(`layer${at + 1}`, $(`layer${n}`).value);
    });
    return params.toString();
  }

  function restore(link) {  // the controls, as a link says
    const params = new URLSearchParams(link);
    for (const name of ["model", "own"]) $(name).value = params.get(name) || "";
    for (const name of SIZES) place(name, params.get(name));
    for (const n of [1, 2, 3]) {
      const method = params.get(`method${n}`);
      $(`card${n}`).hidden = !method;
      if (!method) continue;
      choose($(`method${n}`), method);
      for (const name of ["base", "factor", "text", "layer"]) {
        const field = $(`${name}${n}`), value = params.get(`${name}${n}`);
        if (value == null) delete field.dataset.given; else field.dataset.given = "yes";
        if (name === "layer") field.dataset.wanted = value ?? "";
        else if (name === "text") field.value = value ?? "";
        else place(`${name}${n}`, value);
      }
    }
  }

  function choose(select, name) {
    if (![...select.options].some((o) => o.value === name)) select.add(new Option(name, name));
    select.value = name;
  }

  // ---- requests
  async function fetched(path, options) {
    const response = await fetch(path, options);
    const body = await response.json();
    if (!response.ok) throw new Error(body.mistake);
    return body;
  }

  function tell(id, sentence) {
    $(id).textContent = sentence || "";
    if (id.startsWith("mistake")) $(id).hidden = !sentence;
  }

  async function ask() {  // one request at a time; the last one is always made
    if (asking) { again = true; return; }
    asking = true;
    do {
      again = false;
      const begun = performance.now();
      try {
        const link = query();
        await offer($("own").value);
        const reply = await fetched(`api/draw?${link}`);
        tell("mistake", "");
        history.replaceState(null, "", `?${reply.link}`);
        await render(reply);
      } catch (error) { tell("mistake", error.message); }
      if (again) await new Promise((go) => setTimeout(go, begun + PACE - performance.now()));
    } while (again);
    asking = false;
  }

  let ready = Promise.resolve();
  const request = () => { ready = ready.then(ask); window.longitude.ready = ready; };
  function changed() { if (asking) again = true; else request(); }

  async function offer(own) {  // the methods for a model of this scheme
    if (own === offered) return;
    const groups = await fetched(`api/methods?${new URLSearchParams({ own })}`);
    offered = own;
    for (const n of [1, 2, 3]) {
      const select = $(`method${n}`), before = select.value;
      select.replaceChildren(...groups.map((g) => {
        const group = document.createElement("optgroup");
        group.label = g.group;
        group.append(...g.methods.map((m) => {
          const option = new Option({ own: "baseline", written: "custom" }[m.name] || m.name, m.name);
          option.dataset.what = m.what;
          return option;
        }));
        return group;
      }));
      if (before) choose(select, before); else select.selectedIndex = 0;
    }
  }

  // ---- rendering
  const called = (column, n) => `${LETTERS[n]} ${column.label || column.method}`;

  async function render(reply) {
    answer = reply;
    const cards = shown();
    for (const name of SIZES) place(name, reply.asked[name]);
    if (document.activeElement !== $("own")) $("own").value = reply.asked.own;
    cards.forEach((n, at) => card(n, reply.columns[at]));
    $("add").disabled = cards.length > 2;
    for (const b of document.querySelectorAll(".remove")) b.hidden = cards.length < 2;
    key(reply); facts(reply); captions(reply);
    await show(reply, reply.columns.map(called));
    for (const table of document.querySelectorAll("details.table[open]")) numbers(table);
    tell("status", `Drawn for ${counted(reply.asked.length)} tokens.`);
    clearTimeout(snippetTimer);
    snippetTimer = setTimeout(showSnippets, still ? 0 : 350);
  }

  function card(n, column) {
    tell(`mistake${n}`, column.mistake);
    const option = $(`method${n}`).selectedOptions[0];
    $(`what${n}`).textContent = (option && option.dataset.what) || "";
    $(`notes${n}`).replaceChildren(...(column.notes || []).map((note) => element("li", note)));
    if (column.mistake) return;
    for (const name of ["base", "factor"]) {
      const none = column[name] == null;
      for (const id of [`${name}${n}`, `${name}${n}-slide`]) $(id).disabled = none || column.method === "written";
      $(`${name}${n}`).closest(".control").classList.toggle("off", none);
      place(`${name}${n}`, column[name]);
    }
    const text = $(`text${n}`);
    if (document.activeElement !== text) text.value = column.scheme;
    const layer = $(`layer${n}`);
    layer.closest(".control").hidden = !column.layers.length;
    layer.replaceChildren(...column.layers.map((l, at) => new Option(`layer ${l}`, at)));
    layer.value = column.layer;
  }

  function element(tag, text, more) {
    const made = document.createElement(tag);
    if (text != null) made.textContent = text;
    return Object.assign(made, more);
  }

  function key(reply) {
    const badges = reply.columns.map((column, n) => {
      const item = element("li");
      item.append(element("span", LETTERS[n], { className: `badge s${n + 1}` }), " ",
        element("code", column.drawn || column.method));
      return item;
    });
    const past = element("li");
    past.append(element("span", "", { className: "swatch" }), " past the trained window");
    $("key").replaceChildren(...badges, past);
  }

  const FACTS = [
    ["Known up to", (c) => c.reach == null ? "everywhere" : c.absolute ? `position ${counted(c.reach)}` : `distance ${counted(c.reach)}`,
      "The largest distance at which no slow rotary pair meets an angle outside the trained window (for biases: the window in units of their slopes; for tables: their last row)."],
    ["A cache keeps", (c) => c.causal ? `${counted(c.kept)} of ${counted(c.length)} tokens` : "no cache: bidirectional",
      "The tokens that this or a later query may still see."],
    ["Rotary pairs", (c) => Object.entries(c.states).map(([state, n]) => `${n} ${state}`).join(", ") || "none rotate",
      "What scaling does to the wavelengths, compared with unscaled RoPE of the same base."],
    ["Longest wavelength", (c) => c.longest == null ? "–" : `${counted(Math.round(c.longest))} tokens`, "Of the slowest rotary pair."],
    ["Factor on rotary scores", (c) => c.gain.toFixed(3), "YaRN’s temperature, for one."],
  ];

  function facts(reply) {
    const head = element("tr");
    head.append(element("th", "", { scope: "col" }), ...reply.columns.map((c, n) => element("th", called(c, n), { scope: "col" })));
    const body = FACTS.map(([name, of, why]) => {
      const row = element("tr"), first = element("th", name, { scope: "row", title: why });
      row.append(first, ...reply.columns.map((c) => element("td", c.mistake ? "–" : of(c))));
      return row;
    });
    $("facts").replaceChildren(element("caption", "In numbers", { className: "unseen" }), element("thead"), element("tbody"));
    $("facts").tHead.append(head);
    $("facts").tBodies[0].append(...body);
  }

  function captions(reply) {
    for (const n of [1, 2, 3]) {
      const column = reply.columns[n - 1];
      for (const holder of document.querySelectorAll(`[id^=panel-][id$="${n}"], #tab${n}`))
        holder.querySelector(".called").textContent = column ? column.label || column.method : "";
      $(`tab${n}`).hidden = !column;
    }
    if (snippetColumn > reply.columns.length) snippetColumn = 1;
    for (const tab of document.querySelectorAll(".tab")) tab.setAttribute("aria-pressed", String(Number(tab.dataset.column) === snippetColumn));
  }

  // The rows of a chart as a table of some two dozen rows, for readers who cannot see it.
  function numbers(details) {
    const name = details.dataset.figure, left = ["column", "end", "query", "query_end", "key", "key_end"];
    const every = Object.keys(rows).filter((one) => one.replace(/\d$/, "") === name)
      .flatMap((one) => rows[one].map((row) => /\d$/.test(one) ? { scheme: LETTERS[one.slice(-1) - 1], ...row } : row));
    const step = Math.max(1, Math.ceil(every.length / 48));
    const some = every.filter((_, at) => at % step === 0);
    const names = Object.keys(some[0] || {}).filter((one) => !left.includes(one));
    const head = element("tr");
    head.append(...names.map((one) => element("th", one.replace("_", " "), { scope: "col" })));
    const lines = some.map((row) => {
      const line = element("tr");
      line.append(...names.map((one) => element("td", typeof row[one] === "number" ? counted(row[one]) : row[one] ?? "–")));
      return line;
    });
    const table = details.querySelector("table");
    table.replaceChildren(element("thead"), element("tbody"));
    table.tHead.append(head);
    table.tBodies[0].append(...lines);
  }

  // ---- snippets to copy
  async function showSnippets() {
    const turn = ++snippetRequest;
    try {
      const reply = still ? still.snippets[snippetColumn - 1] : await fetched(`api/snippets?${answer.link}&column=${snippetColumn}`);
      if (turn !== snippetRequest) return;  // a newer request was made meanwhile
      if (reply.mistake) throw new Error(reply.mistake);
      const blocks = [block("The scheme", reply.scheme), ...reply.code.map((c) => block(c.title, c.text))];
      const served = reply.exports.filter((e) => !e.refused).map(exported);
      const not = reply.exports.filter((e) => e.refused).map((e) => {
        const line = element("div"), why = element("dd", e.refused);
        line.append(element("dt", e.runtime), why);
        return line;
      });
      const parts = [...blocks, element("h3", `Runtimes, for ${counted(reply.target)} tokens`), ...served];
      if (not.length) {
        const list = element("dl");
        list.append(...not);
        parts.push(element("h3", "Not supported"), list);
      }
      $("snippets").replaceChildren(...parts);
    } catch (error) { $("snippets").replaceChildren(element("p", error.message, { className: "mistake" })); }
  }

  function block(title, text, notes) {
    const made = element("div", null, { className: "block" });
    const line = element("div", null, { className: "line" }), pre = element("pre", null, { tabIndex: 0 });
    pre.append(element("code", text.trimEnd()));
    line.append(pre, element("button", "Copy", { type: "button", className: "copy" }));
    made.append(element("p", title, { className: "what" }), line, ...(notes || []).map((note) => element("p", note, { className: "note" })));
    return made;
  }

  function exported(one) {
    const text = one.config ? `${JSON.stringify(one.config, null, 2)}\n\n${one.text}` : one.text;
    const what = one.config ? `${one.runtime} ${one.version}: entries of config.json, and how it is loaded` : `${one.runtime} ${one.version}`;
    return block(what, text, one.notes);
  }

  async function copy(button, from) {
    const field = from || (button.dataset.from ? $(button.dataset.from) : button.parentElement.querySelector("code"));
    const before = button.dataset.label ||= button.textContent;
    try {
      await navigator.clipboard.writeText(field.value ?? field.textContent);
      button.textContent = "Copied";
    } catch {  // not allowed here: select it, so that one key copies it
      if (field.select) field.select(); else window.getSelection().selectAllChildren(field);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = before; }, 1600);
  }

  // ---- a model
  async function start(promise, name) {
    try {
      tell("model-status", "Reading its configuration …");
      const reply = await promise;
      restore(reply.link);
      tell("model-status", [`${reply.model || name}: ${reply.own}`, ...reply.notes].join(" · "));
      await ask();
    } catch (error) { tell("model-status", error.message); }
  }

  function load() {
    const name = $("model").value.trim();
    if (name) ready = start(fetched(`api/model?${new URLSearchParams({ name })}`), name);
  }

  function dropped(file) {
    if (!file) return;
    const config = file.text().then((body) => fetched("api/model", { method: "POST", body }));
    ready = start(config, file.name);
  }

  // ---- events
  form.addEventListener("input", (event) => {
    const field = event.target;
    if (field.type === "range") slid(field);
    else if (field.id === "model" || field.type === "file") return;
    else field.dataset.given = "yes";
    const n = field.id.slice(-1);
    if (/^method\d$/.test(field.id))
      for (const name of ["base", "factor", "layer"]) delete $(`${name}${n}`).dataset.given;
    if (/^text\d$/.test(field.id)) choose($(`method${n}`), "written");
    changed();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); load(); });
  $("load").addEventListener("click", load);
  $("model").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); load(); } });
  $("file").addEventListener("change", (event) => dropped(event.target.files[0]));
  for (const name of ["dragover", "dragleave", "drop"])
    document.addEventListener(name, (event) => {
      event.preventDefault();
      document.body.classList.toggle("over", name === "dragover");
      if (name === "drop") dropped(event.dataTransfer.files[0]);
    });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("copy")) copy(button);
    if (button.classList.contains("tab")) { snippetColumn = Number(button.dataset.column); captions(answer); showSnippets(); }
    if (button.classList.contains("remove")) {
      $(`card${button.dataset.column}`).hidden = true;
      restore(query());  // those after it move up
      changed();
    }
    if (button.id === "add") {
      const free = [1, 2, 3].find((n) => $(`card${n}`).hidden);
      if (free) { $(`card${free}`).hidden = false; changed(); $(`method${free}`).focus(); }
    }
    if (button.id === "share") {
      $("saved").textContent = $("saved").href = location.href;
      copy(button, $("saved"));
    }
  });
  for (const details of document.querySelectorAll("details.table"))
    details.addEventListener("toggle", () => { if (details.open) numbers(details); });
  dark.addEventListener("change", () => { ready = ready.then(redraw); });
  window.addEventListener("popstate", () => { restore(location.search); changed(); });

  async function first() {
    if (still) {
      for (const n of still.draw.columns.map((_, at) => at + 1)) $(`card${n}`).hidden = false;
      restore(data.link);
      await render(still.draw);
    } else {
      restore(location.search.length > 1 ? location.search.slice(1) : data.link);
      await offer($("own").value);
      restore(location.search.length > 1 ? location.search.slice(1) : data.link);
      await ask();
    }
  }
  window.longitude.ready = ready = first();
  window.longitude.settled = () => ready;
})();
