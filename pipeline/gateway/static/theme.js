// Before anything is painted: the theme that was chosen on this machine. A plain script, so that it runs at once.
"use strict";
try {
  const chosen = localStorage.getItem("tokenmill.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is switched off: the system's theme it is
}
