(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("curves").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const light = { text: "#5b6570", grid: "#e6e9ed", series: { line: "#0072b2", spread: "#0072b250", sparse: "#d55e00" } };
  const dark = { text: "#9aa5b1", grid: "#2a3036", series: { line: "#56b4e9", spread: "#56b4e950", sparse: "#f58a3c" } };
  const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  const shown = [];
  const chooser = document.getElementById("axis");
  let printing = false;

  // What a step is along an axis: itself, or what had passed when it was done, which grows evenly between two steps that are known.
  const passed = data.runs.map((run) => run.elapsed).filter((e) => e.step.length > 0);
  const units = [[600, 1, "time (s)"], [3 * 3600, 60, "time (min)"], [4 * 86400, 3600, "time (h)"], [Infinity, 86400, "time (days)"]];
  const axis = () => {
    const kind = data.axes[chooser ? chooser.value : 0];
    const [, unit, name] = kind === "seconds" ? units.find(([most]) => Math.max(...passed.map((e) => e.seconds.at(-1))) < most) : [0, 1, kind];
    const at = (run, step) => {
      const { step: known, [kind]: sums } = data.runs[run].elapsed;
      if (kind === "step" || known.length === 0) return step;
      let [low, high] = [0, known.length - 1];
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (known[middle] <= step) low = middle; else high = middle;
      }
      const share = high > low ? Math.min(Math.max((step - known[low]) / (known[high] - known[low]), 0), 1) : 0;
      return (sums[low] + share * (sums[high] - sums[low])) / unit;
    };
    const [min, max] = [Math.min(...passed.map((e) => e[kind][0] / unit)), Math.max(...passed.map((e) => e[kind].at(-1) / unit))];
    return { name, at, min, max: kind === "step" ? Math.max(max, min + 1) : max };
  };

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
        draw: (u) => {
          const { at } = axis();
          made.forEach(([step, i]) => {
            const x = u.valToPos(at(0, step), "x");
            i.hidden = x < -1 || x > u.over.clientWidth + 1;
            i.style.left = x + "px";
          });
        },
      },
    };
  };

  // What happens over a mark happens to the plot below it.
  const first = (u, target, handle) => (e) => { if (e.button === 0) handle(e); };
  const bind = { mousedown: first, mouseup: first, click: first, dblclick: first, mousemove: (u, target, handle) => handle };

  const draw = (chart, place, log) => {
    const colours = scheme.matches && !printing ? dark : light;
    const several = data.runs.length > 1;
    const style = getComputedStyle(document.documentElement);
    const colour = (s) => (several ? style.getPropertyValue("--k" + (s.run % 9)).trim() : colours.series[s.style]);
    // Held-out losses of several runs have their run's colour, and are dotted; so are, in dashes, runs beyond the colours.
    const dash = (s) => (!several ? [] : s.style === "sparse" ? [2, 3] : s.run >= 9 ? [8, 4] : []);
    const { name, at } = axis();
    const steps = name === "step";
    const joined = uPlot.join(chart.series.map((s) => [s.x.map((x) => at(s.run, x)), log ? s.y.map((y) => (y > 0 ? y : null)) : s.y]));
    const lines = { stroke: colours.text, font, grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, width: 1, size: 5 } };
    return new uPlot({
      width: place.clientWidth,
      height: printing ? 170 : 220,
      plugins: [marks()],
      cursor: { bind, sync: { key: "steps", setSeries: false, scales: ["x", null] }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: log ? { distr: 3 } : {} },
      axes: [
        { ...lines, space: 70, size: 30, values: (u, splits) => splits.map((v) => (v == null || (steps && v % 1) ? "" : v >= 1e5 ? compact.format(v) : v.toLocaleString("en"))) },
        { ...lines, size: 58, values: (u, splits) => splits.map(tick) },
      ],
      series: [
        { label: name, value: (u, v) => (v == null ? "–" : v.toLocaleString("en")) },
        ...chart.series.map((s) => ({
          label: s.label,
          stroke: colour(s),
          dash: dash(s),
          width: s.style === "sparse" ? 2 : 1.4,
          spanGaps: s.style === "sparse",
          points: { show: s.x.length < (s.style === "sparse" ? 100 : 3), size: 5, fill: colour(s) },
          value: (u, v) => number(v),
        })),
      ],
    }, joined, place);
  };

  const build = (one) => {
    if (one.plot) one.plot.destroy();
    one.plot = draw(one.chart, one.place, one.box.checked);
    // All charts have the same axis, whatever is missing of one.
    const { min, max } = axis();
    one.plot.setScale("x", { min, max });
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
  if (chooser) chooser.addEventListener("change", all);
  const print = (now) => {
    printing = now;
    shown.forEach((one) => (one.place.style.width = now ? "330px" : ""));
    all();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
