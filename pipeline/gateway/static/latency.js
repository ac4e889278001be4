// Latencies over the last minute. Each worker's histograms count since its start, so new samples are the difference to the
// previous poll. The first poll of a new or restarted worker is only the baseline.

const WINDOW_SECONDS = 60;
const KINDS = ["ttft", "itl"];
const lastMetrics = new Map(); // worker and model -> its metrics in the previous poll
const samples = []; // [time, tier -> kind -> bucket counts], one for each poll

/** Adds the new samples of a response of /v1/status. */
export function addSamples(status) {
  const now = Date.now() / 1000;
  const newCounts = {};
  const workers = new Set();
  for (const { name, metrics } of status.workers) {
    if (!metrics) continue;
    const worker = `${name} ${metrics.model}`;
    workers.add(worker);
    const previous = lastMetrics.get(worker);
    lastMetrics.set(worker, metrics);
    if (!previous || metrics.seconds < previous.seconds) continue;
    for (const [tier, histograms] of Object.entries(metrics.tiers)) {
      for (const kind of KINDS) addCounts(newCounts, tier, kind, histograms[kind].counts, previous.tiers[tier]?.[kind].counts ?? []);
    }
  }
  for (const worker of lastMetrics.keys()) if (!workers.has(worker)) lastMetrics.delete(worker);
  samples.push([now, newCounts]);
  while (samples[0][0] < now - WINDOW_SECONDS) samples.shift();
}

/** Adds the increase from `previousCounts` to `counts`, bucket by bucket, to the totals of a tier and kind. */
function addCounts(totals, tier, kind, counts, previousCounts) {
  const sums = ((totals[tier] ??= {})[kind] ??= []);
  counts.forEach((count, bucket) => (sums[bucket] = (sums[bucket] ?? 0) + Math.max(0, count - (previousCounts[bucket] ?? 0))));
}

/** [p50, p95] in seconds of a tier over the last minute; null: there are no samples. */
export function computeQuantiles(tier, kind, bounds) {
  const totals = {};
  for (const [, newCounts] of samples) addCounts(totals, tier, kind, newCounts[tier]?.[kind] ?? [], []);
  const counts = totals[tier][kind];
  const total = counts.reduce((sum, count) => sum + (count ?? 0), 0);
  return total ? [0.5, 0.95].map((share) => interpolateQuantile(counts, bounds, share * total)) : null;
}

/** The latency below which `rank` samples lie, by linear interpolation within a bucket. */
function interpolateQuantile(counts, bounds, rank) {
  let below = 0;
  for (let bucket = 0; bucket < bounds.length; bucket++) {
    const count = counts[bucket] ?? 0;
    if (count && below + count >= rank) {
      const lower = bucket ? bounds[bucket - 1] : 0;
      return lower + ((rank - below) / count) * (bounds[bucket] - lower);
    }
    below += count;
  }
  return bounds.at(-1);
}

/** The most urgent tier with samples in the last minute; null: there are no samples. */
export const findMostUrgentTier = (bounds) =>
  ["interactive", "standard", "bulk"].find((tier) => computeQuantiles(tier, "ttft", bounds) || computeQuantiles(tier, "itl", bounds)) ?? null;
