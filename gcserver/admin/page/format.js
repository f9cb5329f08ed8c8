// Numbers as people read them. null is what is not known.

const UNKNOWN = "–";

export function size(bytes) {
  if (bytes === null) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (bytes >= 1024 && i < units.length - 1) { bytes /= 1024; i += 1; }
  return `${digits(bytes)} ${units[i]}`;
}

export const rate = (bytes) => (bytes === null ? UNKNOWN : `${size(bytes)}/s`);

export function seconds(s) {
  if (s === null) return UNKNOWN;
  if (s === 0) return "0 s";
  if (s < 1e-3) return `${digits(s * 1e6)} µs`;
  if (s < 1) return `${digits(s * 1e3)} ms`;
  if (s < 120) return `${digits(s)} s`;
  const minutes = Math.floor(s / 60);
  return minutes < 120 ? `${minutes} min` : minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d`;
}

/** Three digits that count. */
export function digits(x) {
  if (x === null) return UNKNOWN;
  if (x >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(3)));
}

export const times = (x) => (x === null ? UNKNOWN : `${digits(x)}×`);
