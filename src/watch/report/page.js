(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("curves").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const light = { text: "#5b6570", grid: "#e6e9ed", series: { line: "#0072b2", spread: "#0072b250", sparse: "#d55e00" } };
  const dark = { text: "#9aa5b1", grid: "#2a3036", series: { line: "#56b4e9", spread: "#56b4e950", sparse: "#f58a3c" } };
  const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  const shown = [];
  let printing = false;

  // Four digits that count, as few as say the same.
  const number = (v) => {
    if (v == null) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a < 1e-3 || a >= 1e9)) return v.toExponential(3).replace(/\.?0+e/, "e");
    return a >= 1e4 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(5)));
  };
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const tick = (v) => {
    if (v == null) return "";
    const a = Math.abs(v);
    return a !== 0 && (a < 1e-3 || a >= 1e9) ? v.toExponential(2).replace(/\.?0+e/, "e") : compact.format(v);
  };

  // Marks are elements over the plot: they say what they are when pointed at.
  const marks = () => {
    const made = data.marks.map((m) => {
      const i = document.createElement("i");
      i.className = "mark " + m.kind;
      i.title = m.text;
      return [m.step, i];
    });
    return {
      hooks: {
        init: (u) => made.forEach(([, i]) => u.over.appendChild(i)),
        draw: (u) => made.forEach(([step, i]) => {
          const x = u.valToPos(step, "x");
          i.hidden = x < -1 || x > u.over.clientWidth + 1;
          i.style.left = x + "px";
        }),
      },
    };
  };

  // What happens over a mark happens to the plot below it.
  const first = (u, target, handle) => (e) => { if (e.button === 0) handle(e); };
  const bind = { mousedown: first, mouseup: first, click: first, dblclick: first, mousemove: (u, target, handle) => handle };

  const draw = (chart, place, log) => {
    const colours = scheme.matches && !printing ? dark : light;
    const joined = uPlot.join(chart.series.map((s) => [s.x, log ? s.y.map((y) => (y > 0 ? y : null)) : s.y]));
    const axis = { stroke: colours.text, font, grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, width: 1, size: 5 } };
    return new uPlot({
      width: place.clientWidth,
      height: printing ? 170 : 220,
      plugins: [marks()],
      cursor: { bind, sync: { key: "steps", setSeries: false, scales: ["x", null] }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: log ? { distr: 3 } : {} },
      axes: [
        { ...axis, space: 70, size: 30, values: (u, splits) => splits.map((v) => (v == null || v % 1 ? "" : v >= 1e5 ? compact.format(v) : v.toLocaleString("en"))) },
        { ...axis, size: 58, values: (u, splits) => splits.map(tick) },
      ],
      series: [
        { label: "step", value: (u, v) => (v == null ? "–" : v.toLocaleString("en")) },
        ...chart.series.map((s) => ({
          label: s.label,
          stroke: colours.series[s.style],
          width: s.style === "sparse" ? 2 : 1.4,
          spanGaps: s.style === "sparse",
          points: { show: s.x.length < (s.style === "sparse" ? 100 : 3), size: 5, fill: colours.series[s.style] },
          value: (u, v) => number(v),
        })),
      ],
    }, joined, place);
  };

  const build = (one) => {
    if (one.plot) one.plot.destroy();
    one.plot = draw(one.chart, one.place, one.box.checked);
    // All curves have the same time axis, whatever is missing of one.
    one.plot.setScale("x", { min: data.steps[0], max: Math.max(data.steps[1], data.steps[0] + 1) });
  };
  const all = () => shown.forEach(build);

  document.querySelectorAll(".chart").forEach((figure, k) => {
    const one = { chart: data.charts[k], place: figure.querySelector("div"), box: figure.querySelector("input"), plot: null };
    one.box.addEventListener("change", () => build(one));
    shown.push(one);
    build(one);
    new ResizeObserver(() => {
      const width = one.place.clientWidth;
      if (!printing && width > 0 && width !== one.plot.width) one.plot.setSize({ width, height: one.plot.height });
    }).observe(one.place);
  });
  scheme.addEventListener("change", all);
  const print = (now) => {
    printing = now;
    shown.forEach((one) => (one.place.style.width = now ? "330px" : ""));
    all();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
