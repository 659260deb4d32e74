(() => {
  "use strict";
  const { font, labels, number, scheme } = plot;
  const data = JSON.parse(document.getElementById("curves").textContent);
  const light = { text: "#5b6570", grid: "#e6e9ed" };
  const dark = { text: "#9aa5b1", grid: "#2a3036" };
  const plots = [];
  let printing = false;

  // Along the axis of all charts: the first unit of which a step is less than ten thousand.
  const step = data.step * data.tick;
  const [unit, name] = [[1e6, "us"], [1e3, "ms"], [1, "s"]].find(([per]) => step * per < 1e4) || [1, "s"];
  const at = (ticks) => ticks * data.tick * unit;
  const [begin, end] = data.shown.map(at);
  const told = (x) => number(Number(x.toPrecision(4))) + " " + name;

  const colour = (k) => getComputedStyle(document.documentElement).getPropertyValue("--k" + (k % 9)).trim();
  const lines = () => {
    const { text, grid } = scheme.matches && !printing ? dark : light;
    return { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 5 } };
  };
  const common = (place, height) => ({
    width: place.clientWidth,
    height,
    cursor: { y: false, sync: { key: "step", setSeries: false, scales: ["x", null] }, drag: { x: true, y: false }, points: { show: false } },
    // All charts have the same axis.
    scales: { x: { time: false, range: (u, min, max) => (min === u.data[0][0] && max === u.data[0].at(-1) ? [begin, end] : [min, max]) } },
  });
  const across = () => ({ ...lines(), space: 70, size: 30, values: (u, splits) => labels(splits).map((l) => (l === "" ? l : l + " " + name)) });
  const shown = { label: "time", value: (u, v) => (v == null ? "–" : told(v)) };

  // A chart is drawn anew in another light, or with another width; what is seen of the axis stays as it is.
  const add = (id, draw) => {
    const figure = document.getElementById(id);
    if (!figure) return null;
    const one = { place: figure.querySelector("div"), said: figure.querySelector(".said"), plot: null };
    one.again = () => {
      const scale = one.plot && one.plot.scales.x;
      const seen = scale && { min: scale.min, max: scale.max };
      if (one.plot) one.plot.destroy();
      one.plot = draw(one);
      if (seen) one.plot.setScale("x", seen);
    };
    one.again();
    plots.push(one);
    new ResizeObserver(() => {
      const width = one.place.clientWidth;
      if (width > 0 && width !== one.plot.width) one.plot.setSize({ width, height: one.plot.height });
    }).observe(one.place);
    return one;
  };

  // Threes of numbers, each from the one before.
  const unpacked = (threes) => {
    let [what, last] = [0, 0];
    const spans = [];
    for (let k = 0; k < threes.length; k += 3) {
      what += threes[k];
      const start = last + threes[k + 1];
      last = start + threes[k + 2];
      spans.push({ what, start: at(start), end: at(last) });
    }
    return spans;
  };
  const stages = data.stages.map((s) => {
    const computes = unpacked(s.computes);
    // From the beginning of a call to its end, whatever it waits for.
    const calls = s.calls.map(([kind, microbatch, chunk]) => ({ kind, microbatch, chunk, start: Infinity, end: -Infinity }));
    computes.forEach(({ what, start, end: until }) => {
      calls[what].start = Math.min(calls[what].start, start);
      calls[what].end = Math.max(calls[what].end, until);
    });
    return { calls, computes, exchanges: unpacked(s.exchanges) };
  });
  const chunks = 1 + Math.max(0, ...stages.map((s) => s.calls.reduce((most, c) => Math.max(most, c.chunk), 0)));
  const calledOn = (call) => {
    const virtual = chunks > 1 ? ", virtual stage " + call.chunk : "";
    return data.kinds[call.kind][0] + (call.kind < data.passes ? " of microbatch " + call.microbatch + virtual : "");
  };

  add("timeline", (one) => {
    const count = stages.length;
    const height = Math.round(Math.min(Math.max(count * 38, 70), 760));
    const colours = [...Array(9).keys()].map(colour);
    const rows = (u) => {
      const { ctx } = u;
      const { left, top, width, height: tall } = u.bbox;
      const row = tall / count;
      const x = (v) => u.valToPos(v, "x", true);
      const [low, high] = [u.scales.x.min, u.scales.x.max];
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top, width, tall);
      ctx.clip();
      const box = (span, y, h) => {
        if (span.end < low || span.start > high) return;
        const from = x(Math.max(span.start, low));
        ctx.fillRect(from, y, Math.max(x(Math.min(span.end, high)) - from, 0.5), h);
      };
      stages.forEach((stage, s) => {
        const y = top + s * row;
        const [upper, lower] = [row * 0.6, row * 0.24];
        const tint = (call) => {
          ctx.fillStyle = colours[data.kinds[call.kind][1]];
          return 1 - (0.55 * call.chunk) / chunks;
        };
        stage.calls.forEach((call) => {
          ctx.globalAlpha = 0.35 * tint(call);
          box(call, y + 1, upper);
        });
        stage.computes.forEach((span) => {
          ctx.globalAlpha = tint(stage.calls[span.what]);
          box(span, y + 1, upper);
        });
        ctx.globalAlpha = 0.9;
        stage.exchanges.forEach((span) => {
          ctx.fillStyle = colours[(data.first_colour + span.what) % 9];
          box(span, y + 1 + upper, lower);
        });
        ctx.globalAlpha = 1;
        ctx.fillStyle = "#000";
        ctx.textAlign = "center";
        ctx.textBaseline = "middle";
        ctx.font = Math.round(Math.min(11 * devicePixelRatio, upper)) + "px system-ui, sans-serif";
        stage.calls.forEach((call) => {
          if (call.kind >= data.passes || call.end < low || call.start > high || upper < 8) return;
          const [from, to] = [x(Math.max(call.start, low)), x(Math.min(call.end, high))];
          if (to - from > 18 * devicePixelRatio) ctx.fillText(call.microbatch, (from + to) / 2, y + 1 + upper / 2);
        });
      });
      ctx.restore();
    };
    const under = (u) => {
      const { left, top } = u.cursor;
      if (left == null || left < 0) return (one.said.textContent = " ");
      const time = u.posToVal(left, "x");
      // What another chart points at is of no stage.
      if (u.cursor.event == null) return (one.said.textContent = told(time));
      const s = Math.min(Math.max(Math.floor((top / u.over.clientHeight) * count), 0), count - 1);
      const whole = (what, span) => what + " (" + told(span.start) + " to " + told(span.end) + ")";
      const is = (span) => span.start <= time && time <= span.end;
      const { calls, computes, exchanges } = stages[s];
      const busy = computes.filter(is).map((span) => whole(calledOn(calls[span.what]), calls[span.what]));
      const waits = calls.filter(is).map((call) => "within " + whole(calledOn(call), call));
      const moved = exchanges.filter(is).map((span) => whole(data.exchanges[span.what], span));
      const said = [...(busy.length > 0 ? busy : waits), ...moved];
      one.said.textContent = "stage " + s + " at " + told(time) + ": " + (said.length > 0 ? said.join("; ") : "waits");
    };
    return new uPlot({
      ...common(one.place, height + 34),
      hooks: { draw: [rows], setCursor: [under] },
      scales: { ...common(one.place).scales, y: { range: [0, count], dir: -1 } },
      axes: [
        across(),
        {
          ...lines(),
          size: 66,
          grid: { show: false },
          splits: () => [...Array(count).keys()].filter((s) => s % Math.ceil(count / 24) === 0).map((s) => s + 0.5),
          values: (u, splits) => splits.map((v) => "stage " + Math.floor(v)),
        },
      ],
      legend: { show: false },
      series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
    }, [[begin, end], [null, null]], one.place);
  });

  const chooser = document.getElementById("stage");
  // In the largest unit of which the most is more than one.
  const largest = Math.max(...data.memory.map((m) => m.planned));
  const [size, binary] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([unit]) => largest >= unit) || [1, "B"];
  const scaled = (bytes) => bytes / size;
  const rounded = (v) => number(Number(v.toPrecision(4))) + " " + binary;
  const memory = add("memory", (one) => {
    const { owners, unit, peak, planned } = data.memory[chooser ? chooser.value : 0];
    const points = owners.length > 0 ? owners[0].bytes.length : 2;
    const xs = [...Array(points).keys()].map((k) => begin + ((end - begin) * k) / (points - 1));
    const sums = [];
    owners.forEach((owner, k) => sums.push(owner.bytes.map((b, p) => scaled(b * unit) + (k > 0 ? sums[k - 1][p] : 0))));
    // Owners of a kind have its colour, each one lighter than the one before.
    const rank = owners.map((o, k) => owners.slice(0, k).filter((other) => other.kind === o.kind).length);
    const fill = owners.map((o, k) => {
      const part = Math.round(100 * Math.max(0.85 - 0.13 * rank[k], 0.25));
      return "color-mix(in srgb," + colour(o.kind) + " " + part + "%,transparent)";
    });
    const solid = (k) => {
      const probe = document.createElement("i");
      probe.style.color = fill[k];
      document.body.appendChild(probe);
      const rgb = getComputedStyle(probe).color;
      probe.remove();
      return rgb;
    };
    const fills = owners.map((_, k) => solid(k));
    const top = scaled(planned);
    const device = scaled(data.device);
    const most = device < 1.5 * top ? Math.max(device, top) : top;
    const level = (u, v, dash) => {
      const y = u.valToPos(v, "y", true);
      const { ctx, bbox } = u;
      ctx.save();
      ctx.strokeStyle = lines().stroke;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.restore();
    };
    one.said.textContent = "Most in use: " + rounded(scaled(peak)) + ". Dashes: " + rounded(top) + " that are planned" +
      (device < 1.5 * top ? "; dots: the device's " : ", of the device's ") + rounded(device) + ".";
    const stepped = uPlot.paths.stepped({ align: 1 });
    return new uPlot({
      ...common(one.place, 300),
      hooks: { draw: [(u) => level(u, top, [8, 5]), (u) => device < 1.5 * top && level(u, device, [2, 4])] },
      scales: { ...common(one.place).scales, y: { range: [0, 1.04 * most] } },
      axes: [across(), { ...lines(), size: 66, values: (u, splits) => labels(splits).map((l) => (l === "" ? l : l + " " + binary)) }],
      bands: owners.slice(1).map((_, k) => ({ series: [k + 2, k + 1], fill: fills[k + 1] })),
      series: [
        shown,
        ...owners.map((o, k) => ({
          label: o.label,
          stroke: colour(o.kind),
          width: 0.7,
          fill: k === 0 ? fills[0] : undefined,
          paths: stepped,
          points: { show: false },
          value: (u, v, series, p) => (p == null ? "–" : rounded(scaled(o.bytes[p] * unit))),
        })),
      ],
      legend: { markers: { fill: (u, k) => (k > 0 ? fills[k - 1] : "transparent") } },
    }, [xs, ...sums], one.place);
  });
  if (chooser && memory) chooser.addEventListener("change", memory.again);

  add("links", (one) => {
    const points = data.links[0].busy.length;
    // Counted over the step: what a stage does ahead of it is at its end.
    const xs = [...Array(points).keys()].map((k) => at((data.step * k) / points));
    // The last part ends with the step.
    const whole = [begin, ...xs, at(data.step), end];
    const stepped = uPlot.paths.stepped({ align: 1 });
    // Streams that use a link at once count each.
    const most = Math.max(100, ...data.links.map((link) => 100 * Math.max(...link.busy)));
    return new uPlot({
      ...common(one.place, 200),
      scales: { ...common(one.place).scales, y: { range: [0, most] } },
      axes: [across(), { ...lines(), size: 58, values: (u, splits) => labels(splits) }],
      series: [
        shown,
        ...data.links.map((link, k) => ({
          label: link.name,
          stroke: colour([0, 5, 2, 3, 7][k % 5]),
          width: 1.3,
          paths: stepped,
          points: { show: false },
          value: (u, v) => (v == null ? "–" : number(Number(v.toPrecision(3))) + " %"),
        })),
      ],
    }, [whole, ...data.links.map((link) => [null, ...[...link.busy, link.busy.at(-1)].map((b) => 100 * b), null])], one.place);
  });

  const all = () => plots.forEach((one) => one.again());
  const print = (now) => {
    printing = now;
    all();
  };
  scheme.addEventListener("change", all);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
