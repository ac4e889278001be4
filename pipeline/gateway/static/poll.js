// Polling: at a lower rate while the page is hidden, and with growing delays while the gateway doesn't respond.

const HIDDEN_INTERVAL_SECONDS = 60;
const MAX_RETRY_SECONDS = 30;
const failedPollers = new Set();

/** Calls `refresh(signal)` until `signal` is aborted, at the given interval or the one in seconds that it returns. */
export async function poll(refresh, intervalSeconds, signal) {
  const poller = {};
  let failures = 0;
  signal.addEventListener("abort", () => updateErrorBanner(poller, null));
  while (!signal.aborted) {
    let delaySeconds = intervalSeconds;
    try {
      delaySeconds = (await refresh(signal)) ?? intervalSeconds;
      failures = 0;
      updateErrorBanner(poller, null);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      failures += 1;
      delaySeconds = error.retryAfterSeconds ?? Math.min(MAX_RETRY_SECONDS, intervalSeconds * 2 ** failures);
      if (error.status !== 401) updateErrorBanner(poller, error); // the key dialog shows a 401
    }
    await waitForNextPoll(document.hidden ? Math.max(delaySeconds, HIDDEN_INTERVAL_SECONDS) : delaySeconds, signal);
  }
}

/** Waits for the given seconds, or until the page becomes visible, a refresh is requested, or `signal` is aborted. */
function waitForNextPoll(seconds, signal) {
  return new Promise((resolve) => {
    const wasHidden = document.hidden;
    const finish = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisibilityChange);
      document.removeEventListener("tokenmill:refresh", finish);
      signal.removeEventListener("abort", finish);
      resolve();
    };
    const onVisibilityChange = () => wasHidden && !document.hidden && finish();
    const timer = setTimeout(finish, seconds * 1000);
    document.addEventListener("visibilitychange", onVisibilityChange);
    document.addEventListener("tokenmill:refresh", finish);
    signal.addEventListener("abort", finish);
  });
}

/** Sets or clears (null) a poller's error. The banner is shown while any poller has one. */
function updateErrorBanner(poller, error) {
  const banner = document.getElementById("error-banner");
  if (error === null) failedPollers.delete(poller);
  else failedPollers.add(poller);
  banner.hidden = failedPollers.size === 0;
  if (error !== null) {
    const message = error.status ? error.message : "The gateway can't be reached.";
    const text = `${message} The data shown may be outdated; retrying.`;
    if (banner.textContent !== text) banner.textContent = text;
  }
}
