// Asking the gateway. The key lives in sessionStorage and in a header, never in an address.

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

/** The answer, which went well; raises `ApiError`, or what `fetch` raises where nobody answers. */
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
    // whoever answered is no gateway: the status must do
  }
  const after = Number(answer.headers.get("Retry-After")) || null;
  return refused(answer.status, error, after);
}

export function refused(status, error, after = null) {
  const message = typeof error?.message === "string" ? error.message : `the server answered ${status}`;
  if (status === 401) document.dispatchEvent(new CustomEvent("tokenmill:key", { detail: message }));
  return new ApiError(status, error?.code ?? "", message, after);
}

/** Sends a file; `progress` is told the share that has gone. `fetch` can't tell that. */
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

/** Lines of an answer as they come, each of `most` characters at the most: what is longer is cut, and marked. */
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

/** Saves a file. With a key it must come by way of this page, since a link carries no header. */
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
