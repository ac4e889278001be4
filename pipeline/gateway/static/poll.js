// Polling: at a lower rate while the page is hidden, and with growing delays while the gateway doesn't respond.

const HIDDEN_SECONDS = 60;
const MOST_SECONDS = 30;
const trouble = new Set();

/** Calls `look(signal)` until `signal` is aborted, at the given interval in seconds or the one that it returns. */
export async function poll(look, seconds, signal) {
  const me = {};
  let failures = 0;
  signal.addEventListener("abort", () => tell(me, null));
  while (!signal.aborted) {
    let wait = seconds;
    try {
      wait = (await look(signal)) ?? seconds;
      failures = 0;
      tell(me, null);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      failures += 1;
      wait = error.after ?? Math.min(MOST_SECONDS, seconds * 2 ** failures);
      if (error.status !== 401) tell(me, error);
    }
    await pause(document.hidden ? Math.max(wait, HIDDEN_SECONDS) : wait, signal);
  }
}

/** Waits for the given seconds, or until the page is visible again. */
function pause(seconds, signal) {
  return new Promise((resolve) => {
    const hidden = document.hidden;
    const end = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", changed);
      document.removeEventListener("tokenmill:again", end);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const changed = () => hidden && !document.hidden && end();
    const timer = setTimeout(end, seconds * 1000);
    document.addEventListener("visibilitychange", changed);
    document.addEventListener("tokenmill:again", end);
    signal.addEventListener("abort", end);
  });
}

function tell(who, error) {
  const shown = document.getElementById("trouble");
  if (error === null) trouble.delete(who);
  else trouble.add(who);
  shown.hidden = trouble.size === 0;
  if (error !== null) {
    const message = error.status ? error.message : "The gateway can't be reached.";
    const text = `${message} What is shown may be old; trying again.`;
    if (shown.textContent !== text) shown.textContent = text;
  }
}
