// Requests to the gateway. The key is in sessionStorage and in a header, never in a URL.

const KEY = "tokenmill.key";
let inMemory = null; // where storage is switched off

export class ApiError extends Error {
  constructor(status, code, message, after) {
    super(message);
    this.status = status;
    this.code = code;
    this.after = after;
  }
}

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? inMemory;
  } catch {
    return inMemory;
  }
}

export function useKey(text) {
  inMemory = text;
  try {
    if (text === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, text);
  } catch {
    // it is in memory
  }
}

export function headers(more = {}) {
  const held = key();
  return held === null ? more : { ...more, Authorization: `Bearer ${held}` };
}

/** Sends a request; returns the successful response. Raises `ApiError`, or the error of `fetch` without a response. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store", credentials: "omit" });
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export const get = async (path, signal) => (await ask(path, { signal })).json();

export async function post(path, body, signal) {
  const options = { method: "POST", signal, headers: { "Content-Type": "application/json" } };
  return ask(path, { ...options, body: JSON.stringify(body) });
}

async function failure(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // the response isn't from a gateway: only its status is known
  }
  const after = Number(answer.headers.get("Retry-After")) || null;
  return refused(answer.status, error, after);
}

export function refused(status, error, after = null) {
  const message = typeof error?.message === "string" ? error.message : `the server answered ${status}`;
  if (status === 401) document.dispatchEvent(new CustomEvent("tokenmill:key", { detail: message }));
  return new ApiError(status, error?.code ?? "", message, after);
}

/** Uploads a file; `progress` is called with the share that is sent, which `fetch` doesn't report. */
export function upload(file, progress, signal) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.responseType = "json";
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => reject(new TypeError("the connection was lost"));
    request.onabort = () => reject(new DOMException("stopped", "AbortError"));
    request.onload = () =>
      request.status < 300 ? resolve(request.response) : reject(refused(request.status, request.response?.error));
    signal?.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

/** Yields the lines of a response as they arrive; lines above `most` characters are truncated and marked. */
export async function* lines(answer, most = Infinity) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let cutShort = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const pieces = value.split("\n");
      for (let place = 0; place < pieces.length; place++) {
        if (place > 0) {
          yield { text: held, cut: cutShort };
          (held = ""), (cutShort = false);
        }
        const room = most - held.length;
        if (pieces[place].length > room) cutShort = true;
        held += pieces[place].slice(0, Math.max(0, room));
      }
    }
    if (held) yield { text: held, cut: cutShort };
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Saves a file. With a key it is downloaded by this page, since a link sends no header. */
export async function save(path, name) {
  const link = document.createElement("a");
  link.download = name;
  if (key() === null) {
    link.href = path;
    link.click();
    return;
  }
  const url = URL.createObjectURL(await (await ask(path)).blob());
  link.href = url;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

export function why(error) {
  return error instanceof ApiError ? error.message : "The gateway can't be reached.";
}
