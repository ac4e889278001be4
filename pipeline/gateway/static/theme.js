// Applies the stored theme before the first paint. A classic script, so that it runs at once.
"use strict";
try {
  const chosen = localStorage.getItem("tokenmill.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is disabled: use the system's theme
}
