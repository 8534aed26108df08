// Finds pages as one types: every word must occur; titles count more than texts.
"use strict";
(() => {
  const box = document.querySelector(".search");
  const field = document.getElementById("search");
  const list = document.getElementById("hits");
  const root = document.documentElement.dataset.root;
  const pages = (window.pages || []).map((page) => ({
    ...page, head: fold(page.title + " " + page.file.split("/").pop().replace(".html", "")), body: fold(page.text),
  }));
  let chosen = -1;

  function fold(text) {
    return text.toLowerCase().normalize("NFD").replace(/[\u0300-\u036f]/g, "").replace(/[_-]+/g, " ");
  }

  function score(page, words) {
    let sum = 0;
    for (const word of words) {
      const at = (" " + page.head).indexOf(" " + word);
      if (at >= 0) sum += at === 0 ? 12 : 8;
      else if (page.head.includes(word)) sum += 4;
      else if ((" " + page.body).includes(" " + word)) sum += 2;
      else if (page.body.includes(word)) sum += 1;
      else return 0;
    }
    return sum;
  }

  function around(page, word) {
    const at = Math.max(0, page.body.indexOf(word) - 40);
    return (at ? "…" : "") + page.text.slice(at, at + 130) + "…";
  }

  function shown() {
    const words = fold(field.value).split(/\s+/).filter(Boolean);
    const hits = words.length ? pages.map((page) => [score(page, words), page]).filter(([s]) => s) : [];
    hits.sort((a, b) => b[0] - a[0] || a[1].title.length - b[1].title.length);
    list.replaceChildren(...hits.slice(0, 9).map(([, page], index) => item(page, words[0], index)));
    if (words.length && !hits.length) {
      const none = document.createElement("li");
      none.textContent = "Nothing found.";
      list.append(none);
    }
    choose(-1);
    open(words.length > 0);
  }

  function item(page, word, index) {
    const line = document.createElement("li");
    const link = document.createElement("a");
    const name = document.createElement("b");
    const text = document.createElement("span");
    line.id = "hit-" + index;
    line.setAttribute("role", "option");
    link.href = root + "/" + page.file;
    link.tabIndex = -1;
    name.textContent = page.title;
    text.textContent = (page.part ? page.part + " · " : "") + around(page, word);
    link.append(name, text);
    line.append(link);
    return line;
  }

  function choose(index) {
    const lines = [...list.querySelectorAll("[role=option]")];
    chosen = index < 0 || !lines.length ? -1 : index % lines.length;
    lines.forEach((line, n) => line.setAttribute("aria-selected", n === chosen));
    if (chosen >= 0) field.setAttribute("aria-activedescendant", lines[chosen].id);
    else field.removeAttribute("aria-activedescendant");
  }

  function open(yes) {
    list.hidden = !yes;
    field.setAttribute("aria-expanded", yes);
  }

  field.addEventListener("input", shown);
  field.addEventListener("focus", () => field.value && shown());
  field.addEventListener("keydown", (event) => {
    const lines = list.querySelectorAll("[role=option]");
    if (event.key === "ArrowDown") choose(chosen + 1);
    else if (event.key === "ArrowUp") choose(chosen > 0 ? chosen - 1 : lines.length - 1);
    else if (event.key === "Enter" && lines.length) lines[Math.max(0, chosen)].querySelector("a").click();
    else if (event.key === "Escape") open(false);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      field.focus();
    }
  });
  document.addEventListener("click", (event) => box.contains(event.target) || open(false));
  box.hidden = false;
})();
