// The page: which view is shown, the theme, and the key.

import { chatView } from "./chat.js";
import { announce, h, notice } from "./dom.js";
import { get, key, useKey, why } from "./api.js";
import { jobView } from "./job.js";
import { jobsView } from "./jobs.js";
import { workersView } from "./overview.js";
import { submitView } from "./submit.js";

const main = document.getElementById("main");
const dialog = document.getElementById("ask");
const VIEWS = { "": ["Jobs", "jobs", jobsView], workers: ["Workers", "workers", workersView], submit: ["Submit", "submit", submitView], chat: ["Chat", "chat", chatView] };
let leaving = new AbortController();
let first = true;

function show() {
  leaving.abort();
  leaving = new AbortController();
  const [name, id] = location.hash.replace(/^#\/?/, "").split("/");
  let title = "Not found";
  let view = null;
  let node = notice("There is nothing here", "The address names no part of this page.", h("a", { href: "#/" }, "Jobs"));
  if (name === "jobs" && id) {
    [title, view, node] = ["Job", "jobs", jobView(leaving.signal, decoded(id))];
  } else if (Object.hasOwn(VIEWS, name === "jobs" ? "" : name)) {
    const [called, shown, make] = VIEWS[name === "jobs" ? "" : name];
    [title, view, node] = [called, shown, make(leaving.signal)];
  }
  document.title = `${title} – tokenmill`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(node);
  if (!first) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  first = false;
}

function decoded(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is shown
  main.focus();
});
addEventListener("hashchange", show);
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault()); // a missed drop must not leave the page

// -- the theme: the system's, or the user's choice

const THEMES = ["system", "light", "dark"];
const themeButton = document.getElementById("theme");
const theme = () => document.documentElement.dataset.theme ?? "system";

function showTheme() {
  themeButton.textContent = `Theme: ${theme()}`;
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("tokenmill.theme", next);
  } catch {
    // it holds until the page is closed
  }
  showTheme();
});

// -- the key: requested when the gateway requires one

const keyInput = document.getElementById("ask-key");
const keyError = document.getElementById("ask-error");
const keyButton = document.getElementById("key");

function showKey() {
  keyButton.hidden = key() === null;
}

document.addEventListener("tokenmill:key", (event) => {
  if (dialog.open) return;
  keyError.hidden = key() === null;
  keyError.textContent = event.detail;
  useKey(null);
  showKey();
  dialog.showModal();
});

dialog.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = keyInput.value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) return refuse("That is no key; it has no spaces, and only plain letters.");
  useKey(given);
  try {
    await get("/v1/models");
  } catch (error) {
    useKey(null);
    return refuse(why(error));
  }
  keyInput.value = "";
  dialog.close();
  showKey();
  announce("The key is taken.");
  show();
});

dialog.addEventListener("cancel", (event) => event.preventDefault()); // without a key there is nothing behind it

keyButton.addEventListener("click", () => {
  useKey(null);
  showKey();
  show();
});

function refuse(message) {
  keyError.textContent = message;
  keyError.hidden = false;
  keyInput.focus();
}

showTheme();
showKey();
show();
