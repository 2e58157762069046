"use strict";
// htmx puts fragments of our own pages into the page; no other text may become markup, and nothing may become a script.
if (window.trustedTypes) {
  window.trustedTypes.createPolicy("default", { createHTML: (text) => text });
}
// A page follows what it shows by server-sent events. While it is not looked at it follows nothing: htmx closes the stream of what is disabled.
const live = document.querySelector("[sse-connect]");
const trouble = document.getElementById("trouble");
const say = (words) => { if (trouble && trouble.textContent !== words) trouble.textContent = words; };
const follow = () => {
  if (!live) return;
  live.toggleAttribute("hx-disable", document.hidden);
  if (window.htmx) window.htmx.process(live);
};
follow();
document.addEventListener("visibilitychange", follow);
// One stream at most, also where htmx tries again after the page was hidden.
let source = null;
const connect = (url) => {
  if (source) source.close();
  source = new EventSource(url);
  source.addEventListener("state", () => say(""));
  source.addEventListener("trouble", (event) => say(event.data));
  source.addEventListener("signed-out", () => window.location.assign("/console/sign-in"));
  if (document.hidden) source.close();
  return source;
};
document.addEventListener("DOMContentLoaded", () => { if (window.htmx) window.htmx.createEventSource = connect; });
document.addEventListener("htmx:sseError", () => say("The connection to the server is lost. This page goes on when it is back."));
// What cannot be undone is asked for once more.
document.addEventListener("submit", (event) => {
  const question = event.submitter && event.submitter.dataset.ask;
  if (question && !window.confirm(question)) event.preventDefault();
});

// News replace part of the page: what had the focus, or was unfolded, has and is so again.
const REACHABLE = "a[href], button, input, select, textarea, summary, [tabindex]";
// Rows may have come in above: what has the focus is known by what it does, and only then by its place.
const purpose = (one) => [one.tagName, one.id, one.getAttribute("href"), one.getAttribute("aria-label"), one.name, one.form && one.form.action].join(" ");
let kept = null;
const keep = () => {
  const open = [...live.querySelectorAll("details")].map((one) => one.open);
  const at = [...live.querySelectorAll(REACHABLE)].indexOf(document.activeElement);
  kept = { at, purpose: at < 0 ? "" : purpose(document.activeElement), open };
};
const restore = () => {
  live.querySelectorAll("details").forEach((one, at) => { if (kept.open[at]) one.open = true; });
  if (kept.at < 0) return;
  const reachable = [...live.querySelectorAll(REACHABLE)];
  const focused = [reachable[kept.at], ...reachable].find((one) => one && purpose(one) === kept.purpose);
  if (focused) focused.focus({ preventScroll: true });
};
// News wait while a button is pressed or text is marked: a click is not lost, and what is marked can be copied. Once a
// form is sent the page is left; a browser does not send a form that news took out of the page just then.
let pressed = false;
let leaving = false;
let waiting = null;
const isHeld = () => {
  const marked = document.getSelection();
  return pressed || leaving || (!marked.isCollapsed && live.contains(marked.anchorNode));
};
const release = () => {
  if (waiting === null || isHeld()) return;
  keep();
  window.htmx.swap(live, waiting, { swapStyle: "innerHTML" });
  waiting = null;
  live.dispatchEvent(new CustomEvent("htmx:sseMessage", { bubbles: true }));
};
if (live) {
  live.addEventListener("pointerdown", () => { pressed = true; });
  for (const name of ["pointerup", "pointercancel"]) document.addEventListener(name, () => { pressed = false; setTimeout(release); });
  document.addEventListener("selectionchange", release);
  live.addEventListener("htmx:sseBeforeMessage", (event) => {
    waiting = null;
    if (!isHeld()) { keep(); return; }
    waiting = event.detail.data;
    event.preventDefault();
  });
  live.addEventListener("htmx:sseMessage", restore);
  window.addEventListener("submit", (event) => { leaving = !event.defaultPrevented; });
  window.addEventListener("pageshow", () => { leaving = false; });
}

// On a phone a row of a table is shown as a card, so each cell knows the name of its column.
const label = () => {
  for (const table of document.querySelectorAll(".wide table")) {
    const names = [...table.tHead.rows[0].cells].map((one) => one.textContent.trim());
    for (const body of table.tBodies) for (const row of body.rows) {
      [...row.cells].forEach((one, at) => { if (one.tagName === "TD" && one.colSpan === 1) one.dataset.label = names[at]; });
    }
    table.classList.add("labelled");
  }
};
label();
document.addEventListener("htmx:sseMessage", label);

// Keys: j and k go through the rows of a list, Enter opens one, / and Ctrl-K open the palette.
const rows = () => [...document.querySelectorAll("main td:first-child a[href], main section.card h2, main section.card h3 a[href]")];
const step = (by) => {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))].focus();
};
const palette = document.getElementById("palette");
if (palette) {
  const input = palette.querySelector("input");
  const list = palette.querySelector("ul");
  const fixed = [...list.children];
  const shown = () => [...list.children].filter((one) => !one.hidden);
  const choose = (at) => {
    shown().forEach((one, place) => one.setAttribute("aria-selected", String(place === at)));
    const chosen = shown()[at];
    if (chosen) { input.setAttribute("aria-activedescendant", chosen.id); chosen.scrollIntoView({ block: "nearest" }); }
    else input.removeAttribute("aria-activedescendant");
  };
  const chosen = () => shown().findIndex((one) => one.getAttribute("aria-selected") === "true");
  const option = (id, words, href) => {
    const item = document.createElement("li");
    item.id = id;
    item.className = "found";
    item.setAttribute("role", "option");
    item.dataset.href = href;
    item.textContent = words;
    return item;
  };
  const filter = () => {
    const words = input.value.trim().toLowerCase();
    for (const one of fixed) one.hidden = !words.split(/\s+/).every((word) => one.textContent.toLowerCase().includes(word));
    list.querySelectorAll(".found").forEach((one) => one.remove());
    const asked = input.value.trim();
    if (asked) {
      const more = [];
      if (/^batch_\w+$/.test(asked)) more.push(option("palette-batch", "Open " + asked, "/console/batches/" + asked));
      more.push(option("palette-search", "Search batches for “" + asked + "”", "/console/batches?q=" + encodeURIComponent(asked)));
      list.append(...more);
    }
    choose(0);
  };
  const open = () => { input.value = ""; filter(); palette.showModal(); };
  document.querySelectorAll("[data-palette]").forEach((one) => { one.hidden = false; one.addEventListener("click", open); });
  input.addEventListener("input", filter);
  palette.addEventListener("click", (event) => {
    if (event.target === palette) palette.close();
    const one = event.target.closest("[data-href]");
    if (one) window.location.assign(one.dataset.href);
  });
  input.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) { event.preventDefault(); choose((chosen() + by + shown().length) % shown().length); }
    if (event.key === "Enter") {
      event.preventDefault();
      const one = shown()[chosen()];
      if (one) window.location.assign(one.dataset.href);
    }
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest && event.target.closest("input, textarea, select, [contenteditable]");
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") { event.preventDefault(); if (!palette.open) open(); }
    else if (typing || event.ctrlKey || event.metaKey || event.altKey || palette.open) return;
    else if (event.key === "/") { event.preventDefault(); open(); }
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
  });
}

// A file may be dropped onto its field; the form itself is a plain one.
document.querySelectorAll(".drop").forEach((place) => {
  const input = place.querySelector("input[type=file]");
  const mark = (on) => (event) => { event.preventDefault(); place.classList.toggle("over", on); };
  place.addEventListener("dragover", mark(true));
  place.addEventListener("dragleave", mark(false));
  place.addEventListener("drop", (event) => {
    mark(false)(event);
    if (event.dataTransfer.files.length) input.files = event.dataTransfer.files;
  });
});
