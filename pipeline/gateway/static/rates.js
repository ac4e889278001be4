// Processing rates of jobs, from the differences between polls.

const WINDOW_SECONDS = 60;
const samplesByJob = new Map(); // job ID -> [[time, processed rows], …]

/** A job's progress as a share; for an ended job the share of rows with a response. null: unknown. */
export function computeProgress(job) {
  const counts = job.request_counts;
  return counts.total ? (counts.completed + (isOpen(job) ? counts.failed : 0)) / counts.total : null;
}

export const isOpen = (job) => ["validating", "in_progress", "finalizing", "cancelling"].includes(job.status);

/** Rows per second over the last minute, by the times at which the counts were taken; null: not known yet. */
export function computeRowRate(job) {
  if (!isOpen(job)) return null;
  const extension = job.tokenmill ?? {};
  const time = extension.as_of ? Date.parse(extension.as_of) / 1000 : Date.now() / 1000;
  const processed = job.request_counts.completed + job.request_counts.failed;
  const samples = samplesByJob.get(job.id) ?? [];
  samplesByJob.set(job.id, samples);
  if (!samples.length || time > samples.at(-1)[0]) samples.push([time, processed]);
  while (samples.length > 2 && samples[0][0] < time - WINDOW_SECONDS) samples.shift();
  const [first, last] = [samples[0], samples.at(-1)];
  return processed && last[0] - first[0] >= 1 ? Math.max(0, (last[1] - first[1]) / (last[0] - first[0])) : null;
}

/** Remaining seconds, by the dispatcher's estimate or else by the rate; null: unknown. */
export function estimateSecondsLeft(job, rowRate) {
  if (!isOpen(job)) return null;
  const eta = job.tokenmill?.eta;
  if (eta) return Math.max(0, (Date.parse(eta) - Date.now()) / 1000);
  const counts = job.request_counts;
  const rows = counts.total - counts.completed - counts.failed;
  return rowRate && counts.total ? rows / rowRate : null;
}
