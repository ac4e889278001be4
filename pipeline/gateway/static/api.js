// Requests to the gateway. The API key is in sessionStorage and in a header, never in a URL.

const STORAGE_KEY = "tokenmill.key";
let memoryKey = null; // the fallback where storage is disabled

export class ApiError extends Error {
  constructor(status, code, message, retryAfterSeconds) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

export function getKey() {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? memoryKey;
  } catch {
    return memoryKey;
  }
}

export function setKey(key) {
  memoryKey = key;
  try {
    if (key === null) sessionStorage.removeItem(STORAGE_KEY);
    else sessionStorage.setItem(STORAGE_KEY, key);
  } catch {
    // storage is disabled: the key is only in memory
  }
}

export function buildHeaders(headers = {}) {
  const key = getKey();
  return key === null ? headers : { ...headers, Authorization: `Bearer ${key}` };
}

/** Sends a request; returns the successful response. Raises `ApiError`, or the error of `fetch` without a response. */
export async function sendRequest(path, options = {}) {
  const response = await fetch(path, { ...options, headers: buildHeaders(options.headers), cache: "no-store", credentials: "omit" });
  if (!response.ok) throw await readError(response);
  return response;
}

export const getJson = async (path, signal) => (await sendRequest(path, { signal })).json();

/** Posts a JSON body; returns the response, which can be a stream. */
export async function postJson(path, body, signal) {
  const options = { method: "POST", signal, headers: { "Content-Type": "application/json" } };
  return sendRequest(path, { ...options, body: JSON.stringify(body) });
}

async function readError(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // the response isn't from a gateway: only its status is known
  }
  const retryAfterSeconds = Number(response.headers.get("Retry-After")) || null;
  return createApiError(response.status, error, retryAfterSeconds);
}

/** Creates an `ApiError`. Status 401 also dispatches `tokenmill:unauthorized`, which opens the key dialog. */
export function createApiError(status, error, retryAfterSeconds = null) {
  const message = typeof error?.message === "string" ? error.message : `the server responded with status ${status}`;
  if (status === 401) document.dispatchEvent(new CustomEvent("tokenmill:unauthorized", { detail: message }));
  return new ApiError(status, error?.code ?? "", message, retryAfterSeconds);
}

/** Uploads a file and calls `onProgress` with the uploaded share. `fetch` reports no upload progress, hence XMLHttpRequest. */
export function uploadFile(file, onProgress, signal) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(buildHeaders())) request.setRequestHeader(name, value);
    request.responseType = "json";
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(new TypeError("the connection was lost"));
    request.onabort = () => reject(new DOMException("the upload was aborted", "AbortError"));
    request.onload = () =>
      request.status < 300 ? resolve(request.response) : reject(createApiError(request.status, request.response?.error));
    signal?.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

/** Yields the lines of a response as they arrive; lines above `maxLength` characters are truncated and marked. */
export async function* readLines(response, maxLength = Infinity) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let isTruncated = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = value.split("\n");
      for (let index = 0; index < parts.length; index++) {
        if (index > 0) {
          yield { text, isTruncated };
          (text = ""), (isTruncated = false);
        }
        const remaining = maxLength - text.length;
        if (parts[index].length > remaining) isTruncated = true;
        text += parts[index].slice(0, Math.max(0, remaining));
      }
    }
    if (text) yield { text, isTruncated };
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Saves a file. With a key the page downloads it, since a link sends no header. */
export async function saveFile(path, name) {
  const link = document.createElement("a");
  link.download = name;
  if (getKey() === null) {
    link.href = path;
    link.click();
    return;
  }
  const url = URL.createObjectURL(await (await sendRequest(path)).blob());
  link.href = url;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

export function describeError(error) {
  return error instanceof ApiError ? error.message : "The gateway can't be reached.";
}
