"use strict";
// htmx puts fragments of our own pages into the page; no other text may become markup, and nothing may become a script.
if (window.trustedTypes) {
  window.trustedTypes.createPolicy("default", { createHTML: (text) => text });
}
// A page that is not looked at asks for nothing.
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden) event.preventDefault();
});
// A session that ended, or a refusal, is shown as a page of its own.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (new URL(event.detail.xhr.responseURL).pathname === "/console/sign-in") window.location.assign("/console/sign-in");
});
// What cannot be undone is asked for once more.
document.addEventListener("submit", (event) => {
  const question = event.submitter && event.submitter.dataset.ask;
  if (question && !window.confirm(question)) event.preventDefault();
});
