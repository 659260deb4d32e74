// What the scripts of pages share.
const plot = (() => {
  "use strict";
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";

  // Four digits that count, as few as say the same.
  const number = (v) => {
    if (v == null) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a < 1e-3 || a >= 1e9)) return v.toExponential(3).replace(/\.?0+e/, "e");
    return a >= 1e4 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(5)));
  };
  // Labels of an axis, with as many digits as tell them apart; great ones are short where that says the same.
  const labels = (splits) => {
    const known = splits.filter((v) => v != null);
    const gaps = known.slice(1).map((v, k) => Math.abs(v - known[k])).filter((gap) => gap > 0);
    const most = Math.max(...known.map(Math.abs));
    const gap = gaps.length > 0 ? Math.min(...gaps) : most / 1e4;
    let digits = 3;
    while (digits < 15 && known.some((v) => Math.abs(Number(v.toPrecision(digits)) - v) > gap / 100)) digits += 1;
    const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits });
    const isShort = most >= 1e4 && (digits <= 4 || most >= 1e9);
    return splits.map((v) => {
      if (v == null) return "";
      const a = Math.abs(v);
      if (a !== 0 && (a < 1e-3 || a >= 1e15)) return v.toExponential(Math.min(digits - 1, 3)).replace(/\.?0+e/, "e");
      return isShort ? short.format(v) : v.toLocaleString("en", { maximumSignificantDigits: digits });
    });
  };

  return { font, labels, number, scheme };
})();
