// Latencies over the last minute: each worker counts in buckets since its start, so new samples are the difference to the
// previous poll. The first poll of a new or restarted worker is only the baseline.

const WINDOW = 60;
const KINDS = ["ttft", "itl"];
const last = new Map(); // worker and model -> its tiers when it was last seen
const looks = []; // [moment, tier -> kind -> counts]

/** Adds the new samples of a response of /v1/status. */
export function learn(status) {
  const now = Date.now() / 1000;
  const fresh = {};
  const names = new Set();
  for (const { name, metrics } of status.workers) {
    if (!metrics) continue;
    const who = `${name} ${metrics.model}`;
    names.add(who);
    const before = last.get(who);
    last.set(who, metrics);
    if (!before || metrics.seconds < before.seconds) continue;
    for (const [tier, told] of Object.entries(metrics.tiers)) {
      for (const kind of KINDS) add(fresh, tier, kind, told[kind].counts, before.tiers[tier]?.[kind].counts ?? []);
    }
  }
  for (const who of last.keys()) if (!names.has(who)) last.delete(who);
  looks.push([now, fresh]);
  while (looks[0][0] < now - WINDOW) looks.shift();
}

function add(all, tier, kind, counts, before) {
  const sums = ((all[tier] ??= {})[kind] ??= []);
  counts.forEach((count, place) => (sums[place] = (sums[place] ?? 0) + Math.max(0, count - (before[place] ?? 0))));
}

/** [p50, p95] in seconds of a tier over the last minute; null: there are no samples. */
export function quantiles(tier, kind, bounds) {
  const all = {};
  for (const [, fresh] of looks) add(all, tier, kind, fresh[tier]?.[kind] ?? [], []);
  const counts = all[tier][kind];
  const total = counts.reduce((sum, count) => sum + (count ?? 0), 0);
  return total ? [0.5, 0.95].map((share) => quantile(counts, bounds, share * total)) : null;
}

/** The quantile, by linear interpolation within a bucket. */
function quantile(counts, bounds, wanted) {
  let below = 0;
  for (let place = 0; place < bounds.length; place++) {
    const count = counts[place] ?? 0;
    if (count && below + count >= wanted) {
      const from = place ? bounds[place - 1] : 0;
      return from + ((wanted - below) / count) * (bounds[place] - from);
    }
    below += count;
  }
  return bounds.at(-1);
}

/** The most urgent tier with samples in the last minute. */
export const busiest = (bounds) =>
  ["interactive", "standard", "bulk"].find((tier) => quantiles(tier, "ttft", bounds) || quantiles(tier, "itl", bounds)) ?? null;
