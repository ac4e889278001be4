// Processing rates of jobs, from the differences between polls.

const WINDOW = 60;
const looks = new Map();

/** A job's progress as a share; of an ended job the share of rows with a response. null: unknown. */
export function share(job) {
  const counts = job.request_counts;
  return counts.total ? (counts.completed + (isOpen(job) ? counts.failed : 0)) / counts.total : null;
}

export const isOpen = (job) => ["validating", "in_progress", "finalizing", "cancelling"].includes(job.status);

/** Rows a second over the last minute, by the times at which the counts were taken; null: not known yet. */
export function rowRate(job) {
  if (!isOpen(job)) return null;
  const own = job.tokenmill ?? {};
  const at = own.as_of ? Date.parse(own.as_of) / 1000 : Date.now() / 1000;
  const done = job.request_counts.completed + job.request_counts.failed;
  const seen = looks.get(job.id) ?? [];
  looks.set(job.id, seen);
  if (!seen.length || at > seen.at(-1)[0]) seen.push([at, done]);
  while (seen.length > 2 && seen[0][0] < at - WINDOW) seen.shift();
  const [first, last] = [seen[0], seen.at(-1)];
  return done && last[0] - first[0] >= 1 ? Math.max(0, (last[1] - first[1]) / (last[0] - first[0])) : null;
}

/** Remaining seconds, by the dispatcher's estimate or else by the rate; null: unknown. */
export function left(job, rate) {
  if (!isOpen(job)) return null;
  const eta = job.tokenmill?.eta;
  if (eta) return Math.max(0, (Date.parse(eta) - Date.now()) / 1000);
  const counts = job.request_counts;
  const rows = counts.total - counts.completed - counts.failed;
  return rate && counts.total ? rows / rate : null;
}
