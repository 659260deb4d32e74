(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("curves").textContent);
  const { font, labels, number, scheme } = plot;
  const light = { text: "#5b6570", grid: "#e6e9ed", series: { line: "#0072b2", spread: "#0072b250", sparse: "#d55e00" } };
  const dark = { text: "#9aa5b1", grid: "#2a3036", series: { line: "#56b4e9", spread: "#56b4e950", sparse: "#f58a3c" } };
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
    // Some marks are at no step's end, and may be after the last.
    const place = (mark) => (kind === "seconds" && mark.seconds != null ? mark.seconds / unit : at(mark.run, mark.step));
    const ends = [...passed.map((e) => e[kind].at(-1) / unit), ...(kind === "seconds" ? data.marks.map(place) : [])];
    const [min, max] = [Math.min(...passed.map((e) => e[kind][0] / unit)), Math.max(...ends)];
    return { name, at, place, min, max: kind === "step" ? Math.max(max, min + 1) : max };
  };

  // From a digit of a power of ten to another, so that ticks are at such.
  const rounded = (u, min, max) => {
    if (!(min > 0 && max > 0)) return [1, 10];
    const [low, high] = [Math.floor, Math.ceil].map((round, k) => {
      const v = k ? max : min;
      const power = 10 ** Math.floor(Math.log10(v) + 1e-9);
      return Number((round(v / power + (k ? -1e-9 : 1e-9)) * power).toPrecision(3));
    });
    return low < high ? [low, high] : [low / 2, high * 2];
  };

  // Marks are elements over the plot: they say what they are when pointed at.
  const marks = () => {
    const made = data.marks.map((m) => {
      const i = document.createElement("i");
      i.className = "mark " + m.kind;
      i.title = m.text;
      // Several runs have a row each, in which a sign says what it is.
      if (data.runs.length > 1) {
        i.classList.add("sign");
        i.style.color = "var(--k" + (m.run % 9) + ")";
        i.style.top = 2 + 9 * (m.run % 9) + "px";
      }
      return [m, i];
    });
    return {
      hooks: {
        init: (u) => made.forEach(([, i]) => u.over.appendChild(i)),
        draw: (u) => {
          const { place } = axis();
          made.forEach(([mark, i]) => {
            const x = u.valToPos(place(mark), "x");
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
    const { name, at, min: begin, max: end } = axis();
    const steps = name === "step";
    // All charts have the same axis, whatever is missing of one.
    const wide = (u, min, max) => {
      const isAll = min === u.data[0][0] && max === u.data[0].at(-1);
      const [low, high] = isAll ? [begin, end] : [min, max];
      return low === high ? [low - 1, high + 1] : [low, high];
    };
    // Of a run that has ended, or not begun, there is no number under the pointer.
    const prox = (u, k, index, x) => {
      const s = chart.series[k - 1];
      const within = s && s.x.length > 0 && x >= at(s.run, s.x[0]) && x <= at(s.run, s.x.at(-1));
      return within ? Infinity : 12;
    };
    const joined = uPlot.join(chart.series.map((s) => [s.x.map((x) => at(s.run, x)), log ? s.y.map((y) => (y > 0 ? y : null)) : s.y]));
    const lines = { stroke: colours.text, font, grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, width: 1, size: 5 } };
    return new uPlot({
      width: place.clientWidth,
      height: printing ? 170 : 220,
      plugins: [marks()],
      cursor: { bind, y: false, hover: { prox }, sync: { key: "steps", setSeries: false, scales: ["x", null] }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: wide }, y: log ? { distr: 3, range: rounded } : {} },
      axes: [
        { ...lines, space: 70, size: 30, values: (u, splits) => labels(splits.map((v) => (steps && v % 1 ? null : v))) },
        { ...lines, size: (u, texts) => Math.max(58, 16 + 7 * Math.max(...(texts || []).map((t) => t.length))),
          values: (u, splits) => labels(splits) },
      ],
      legend: { markers: { dash: (u, k) => (k > 0 && dash(chart.series[k - 1]).length > 0 ? "dotted" : "solid") } },
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

  // What is seen of the axis stays as it is.
  const again = (one) => {
    const { min, max } = one.plot.scales.x;
    one.plot.destroy();
    one.plot = draw(one.chart, one.place, one.box.checked);
    one.plot.setScale("x", { min, max });
  };
  const all = () => shown.forEach(again);
  const whole = () => shown.forEach((one) => {
    one.plot.destroy();
    one.plot = draw(one.chart, one.place, one.box.checked);
  });

  document.querySelectorAll(".chart").forEach((figure, k) => {
    const one = { chart: data.charts[k], place: figure.querySelector("div"), box: figure.querySelector("input"), plot: null };
    one.plot = draw(one.chart, one.place, one.box.checked);
    one.box.addEventListener("change", () => again(one));
    shown.push(one);
    new ResizeObserver(() => {
      const width = one.place.clientWidth;
      if (!printing && width > 0 && width !== one.plot.width) one.plot.setSize({ width, height: one.plot.height });
    }).observe(one.place);
  });
  scheme.addEventListener("change", all);
  if (chooser) chooser.addEventListener("change", whole);
  const print = (now) => {
    printing = now;
    shown.forEach((one) => (one.place.style.width = now ? "330px" : ""));
    all();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
