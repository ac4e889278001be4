// The page: routing between the views, the theme, and the API key.

import { describeError, getJson, getKey, setKey } from "./api.js";
import { createChatView } from "./chat.js";
import { announce, createNotice, h } from "./dom.js";
import { createJobView } from "./job.js";
import { createJobsView } from "./jobs.js";
import { createWorkersView } from "./overview.js";
import { createSubmitView } from "./submit.js";

const main = document.getElementById("main");
const VIEWS = { "": ["Jobs", "jobs", createJobsView], workers: ["Workers", "workers", createWorkersView], submit: ["Submit", "submit", createSubmitView], chat: ["Chat", "chat", createChatView] };
let viewController = new AbortController(); // aborts the polls and the requests of the current view
let isFirstView = true;

function showView() {
  viewController.abort();
  viewController = new AbortController();
  const [route, id] = location.hash.replace(/^#\/?/, "").split("/");
  let title = "Not found";
  let navigationName = null;
  let node = createNotice("Page not found", "No view has this address.", h("a", { href: "#/" }, "Jobs"));
  if (route === "jobs" && id) {
    [title, navigationName, node] = ["Job", "jobs", createJobView(viewController.signal, decodeId(id))];
  } else if (Object.hasOwn(VIEWS, route === "jobs" ? "" : route)) {
    const [viewTitle, viewName, createView] = VIEWS[route === "jobs" ? "" : route];
    [title, navigationName, node] = [viewTitle, viewName, createView(viewController.signal)];
  }
  document.title = `${title} – tokenmill`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === navigationName) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(node);
  if (!isFirstView) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  isFirstView = false;
}

function decodeId(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash selects the view, so it must not become #main
  main.focus();
});
addEventListener("hashchange", showView);
for (const type of ["dragover", "drop"]) addEventListener(type, (event) => event.preventDefault()); // a file dropped beside the zone must not replace the page

// -- the theme: the system's, or the user's choice

const THEMES = ["system", "light", "dark"];
const themeButton = document.getElementById("theme");
const getTheme = () => document.documentElement.dataset.theme ?? "system";

function updateThemeButton() {
  themeButton.textContent = `Theme: ${getTheme()}`;
}

themeButton.addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(getTheme()) + 1) % THEMES.length];
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("tokenmill.theme", theme);
  } catch {
    // storage is disabled: the theme lasts until the page is closed
  }
  updateThemeButton();
});

// -- the API key: requested when the gateway requires one

const keyDialog = document.getElementById("key-dialog");
const keyInput = document.getElementById("key-input");
const keyError = document.getElementById("key-error");
const forgetKeyButton = document.getElementById("forget-key");

function updateForgetKeyButton() {
  forgetKeyButton.hidden = getKey() === null;
}

document.addEventListener("tokenmill:unauthorized", (event) => {
  if (keyDialog.open) return;
  keyError.hidden = getKey() === null;
  keyError.textContent = event.detail;
  setKey(null);
  updateForgetKeyButton();
  keyDialog.showModal();
});

keyDialog.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = keyInput.value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return showKeyError("This key is invalid: keys have only ASCII characters and no spaces.");
  setKey(key);
  try {
    await getJson("/v1/models");
  } catch (error) {
    setKey(null);
    return showKeyError(describeError(error));
  }
  keyInput.value = "";
  keyDialog.close();
  updateForgetKeyButton();
  announce("The key is accepted.");
  showView();
});

keyDialog.addEventListener("cancel", (event) => event.preventDefault()); // without a key no view has data

forgetKeyButton.addEventListener("click", () => {
  setKey(null);
  updateForgetKeyButton();
  showView();
});

function showKeyError(message) {
  keyError.textContent = message;
  keyError.hidden = false;
  keyInput.focus();
}

updateThemeButton();
updateForgetKeyButton();
showView();
