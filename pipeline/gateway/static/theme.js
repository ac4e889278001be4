// Applies the stored theme before the first paint. A classic script, since a module would run after the first paint.
"use strict";
try {
  const theme = localStorage.getItem("tokenmill.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is disabled: the page uses the system's theme
}
